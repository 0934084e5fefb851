"""The few calls that checkpoints in object storage are built on.

There is no rename and no append: an object appears whole, by one call, or not at all. A back end for an object store
implements these and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class StorageError(OSError):
    """Storage refused or did not answer; the message names the call, the object, and a fix if one is known."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.strerror = text


class StorageTimeout(StorageError):
    """No answer within the deadline; whether the call took effect is unknown."""


class ObjectMissing(StorageError):
    """There is no such object, or it is shorter than expected."""


class SharedUploads(Protocol):
    """Uploads of which several machines send the parts. Calls raise as those of `ObjectStore` do."""

    def begin(self, key: str) -> str:
        """Begin an upload; return what the others need to send parts."""

    def send(self, key: str, upload: str, first: int, parts: Sequence[memoryview]) -> list[Any]:
        """Send consecutive parts, the first of which has number `first`, from 0; return a receipt for each."""

    def complete(self, key: str, upload: str, receipts: Sequence[Any], nbytes: int) -> None:
        """Make an object of `nbytes` bytes of the parts."""

    def abort(self, key: str, upload: str) -> None:
        """Give an upload up; a failure is left to `ObjectStore.abort_uploads`."""


class ObjectStore(Protocol):
    """A folder of objects. Keys are relative to it; `/` separates.

    Every call returns within a deadline of its own, or raises StorageError: the store refused, or did not answer.

    Attributes:
        location: The URL, as the user gave it.
        transferred: Called with a number of bytes as they are sent or received.
        retried: Called with the reason, from any thread, before a call is retried.
        shared_uploads: Uploads by several machines; None where the store has none.
    """

    location: str
    transferred: Callable[[int], None]
    retried: Callable[[str], None]

    @property
    def shared_uploads(self) -> SharedUploads | None:
        """See above."""

    @property
    def honours_if_absent(self) -> bool:
        """Whether `put(if_absent=True)` is decided by the server, so that of several writers one wins."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Store a small object; with `if_absent`, return False if there is one already."""

    def upload(self, key: str, pieces: Iterable[memoryview], nbytes: int | None = None) -> int:
        """Store an object of any size, its bytes given in order; return its size. A failed upload leaves nothing.

        A piece may be overwritten when the next is asked for, unless they are a sequence. Where they are none, an
        object of more than 300 GB needs its size in advance: stores limit the number of parts.
        """

    def get(self, key: str) -> bytes | None:
        """Return a small object's bytes; None if there is none."""

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """Fill `target` with the object's bytes from `start` on.

        Raises:
            ObjectMissing: The object is missing or too short.
        """

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the size in bytes of every object whose key begins with `folder`, by key."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are ignored."""

    def abort_uploads(self, among: Callable[[str], bool] = lambda key: True) -> int:
        """Abort uploads of those keys that dead writers have left unfinished; return their number."""


@dataclass(frozen=True)
class ObjectFile:
    """An object, to be read by ranges: a `RemoteFile`."""

    store: ObjectStore
    key: str
    nbytes: int

    def read_into(self, start: int, target: memoryview) -> None:
        """Get a range."""
        self.store.read_into(self.key, start, target)
