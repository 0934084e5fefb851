"""The few things that checkpoints in object storage are built on; every back end gives these and no more.

There is no rename and no append: an object appears whole, by one call, or not at all.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol


class StorageError(OSError):
    """Storage refused or did not answer; the text says which call on which object, and the mend where there is one."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.strerror = text


class StorageTimeout(StorageError):
    """No answer within the deadline. Whether the call took effect is not known."""


class ObjectMissing(StorageError):
    """There is no such object, or not all of it."""


class ObjectStore(Protocol):
    """A folder of objects. Keys are relative to it; `/` separates.

    Every call returns or raises within a deadline of its own.

    Attributes:
        location: the URL, as the user gave it.
        transferred: told of bytes as they go.
        retried: told why, before a call is made again; from any thread.
    """

    location: str
    transferred: Callable[[int], None]
    retried: Callable[[str], None]

    @property
    def honours_if_absent(self) -> bool:
        """Whether `put(if_absent=True)` is decided by the server, so that of several writers one wins.

        Raises:
            StorageError: refused, or no answer.
        """

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Store a small object; with `if_absent`, False where there is one already.

        Raises:
            StorageError: refused, or no answer.
        """

    def upload(self, key: str, pieces: Iterable[memoryview]) -> int:
        """Store an object of any size, its bytes given in order; returns its size. Nothing is left of a failed one.

        A piece may be overwritten when the next is asked for, unless they are a sequence.

        Raises:
            StorageError: refused, or no answer.
        """

    def get(self, key: str) -> bytes | None:
        """A small object's bytes; None where there is none.

        Raises:
            StorageError: refused, or no answer.
        """

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """Fill `target` with the object's bytes from `start` on.

        Raises:
            ObjectMissing: it is missing or too short.
            StorageError: refused, or no answer.
        """

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Every object whose key begins with `folder`, and its size in bytes.

        Raises:
            StorageError: refused, or no answer.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are missing are none.

        Raises:
            StorageError: refused, or no answer.
        """

    def abort_uploads(self, among: Callable[[str], bool] = lambda key: True) -> int:
        """End what dead writers have left half uploaded, of those keys; returns how many there were.

        Raises:
            StorageError: refused, or no answer.
        """


def probe(store: ObjectStore) -> None:
    """Put, get, list, delete: whatever a run will need.

    Raises:
        StorageError: something is refused; the text says what.
    """
    key, data = f"probe/{uuid.uuid4().hex}", b"written by checkpointing to see what is allowed here"
    store.put(key, data)
    try:
        if store.get(key) != data or key not in store.sizes(key):
            raise StorageError(f"{store.location}: what was written there cannot be read back")
    finally:
        store.delete([key])
