"""Any other fsspec file system (`gs://`, `az://`, `memory://`, ...) as an object store.

Works where writing a file makes it appear whole when it is closed, as object stores do.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from typing import Any, TypeVar

from checkpointing.errors import PASSING_ERRNOS
from checkpointing.host.threads import in_background
from checkpointing.storage.object_storage import ObjectStorage
from checkpointing.storage.object_store import ObjectMissing, StorageError, StorageTimeout

_DEADLINE_S = 60.0
# What a server that is there says of its disk.
_ANSWERS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_MIN_BYTES_PER_S = 100_000
_CHUNK_BYTES = 16 * 1024 * 1024
# S3 allows 10,000.
_MAX_CHUNKS = 9_000

T = TypeVar("T")


class FilesystemStore:
    """See `ObjectStore`. For most servers it is unknown whether they decide "only if absent": it counts as no.

    Raises:
        ValueError: The location's scheme is unknown, or its package is not installed.
    """

    honours_if_absent = False
    shared_uploads = None

    def __init__(self, location: str) -> None:
        import fsspec

        self.location = location.rstrip("/")
        self.transferred: Callable[[int], None] = lambda nbytes: None
        # Retries of back ends are invisible.
        self.retried: Callable[[str], None] = lambda reason: None
        scheme = self.location.partition("://")[0]
        try:
            fsspec.get_filesystem_class(scheme)
        except ValueError:
            raise ValueError(
                f"checkpoint.location {location!r}: scheme {scheme!r} is not known; use a path, file://, s3://, or "
                "one that fsspec knows"
            ) from None
        except ImportError as error:
            raise ValueError(f"checkpoint.location {location!r}: {error}") from None

    @functools.cached_property
    def _place(self) -> tuple[Any, str]:
        """The file system, which may connect when it is made, and our folder in it."""
        import fsspec

        file_system, root = fsspec.core.url_to_fs(self.location)
        return file_system, str(root).rstrip("/") + "/"

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Write a file at once."""

        def work(fs: Any, root: str) -> bool:
            if if_absent and fs.exists(root + key):
                return False
            fs.pipe_file(root + key, data)
            return True

        return self._call(f"put {key}", work, len(data))

    def upload(self, key: str, pieces: Iterable[memoryview], nbytes: int | None = None) -> int:
        """Write a file chunk by chunk."""
        given = list(pieces) if isinstance(pieces, Sequence) else pieces

        def work(fs: Any, root: str) -> int:
            written = 0
            with fs.open(root + key, "wb", block_size=max(_CHUNK_BYTES, -(-expected // _MAX_CHUNKS))) as file:
                for piece in given:
                    for start in range(0, len(piece), _CHUNK_BYTES):
                        self.transferred(file.write(piece[start : start + _CHUNK_BYTES]))
                    written += len(piece)
            return written

        if isinstance(given, list):
            nbytes = sum(len(piece) for piece in given)
        expected = nbytes if nbytes is not None else 1 << 33
        return self._call(f"upload {key}", work, expected)

    def get(self, key: str) -> bytes | None:
        """Read a file."""

        def work(fs: Any, root: str) -> bytes | None:
            try:
                return bytes(fs.cat_file(root + key))
            except FileNotFoundError:
                return None

        return self._call(f"get {key}", work)

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """Read a range of a file."""
        expected = len(target)

        def work(fs: Any, root: str) -> bytes:
            try:
                data = fs.cat_file(root + key, start=start, end=start + expected)
            except FileNotFoundError:
                raise ObjectMissing(f"{self.location}/{key} is missing") from None
            if len(data) != expected:
                raise ObjectMissing(f"{self.location}/{key} is shorter than it was")
            return bytes(data)

        # Not in the thread: an abandoned one would write into memory that has been reused.
        target[:] = self._call(f"read {key}", work, expected)
        self.transferred(expected)

    def sizes(self, folder: str = "") -> dict[str, int]:
        """List files."""

        def work(fs: Any, root: str) -> dict[str, int]:
            # Other machines write here, so nothing may come from a cache.
            fs.invalidate_cache()
            try:
                # A whole folder's name need not list all others.
                found = fs.find((root + folder if folder.endswith("/") else root).rstrip("/"), detail=True)
            except FileNotFoundError:
                return {}
            keys = {str(name).removeprefix(root): int(info["size"]) for name, info in found.items()}
            return {key: size for key, size in keys.items() if key.startswith(folder)}

        return self._call("list", work)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove files one by one."""

        def work(fs: Any, root: str) -> None:
            for key in keys:
                try:
                    fs.rm_file(root + key)
                except FileNotFoundError:
                    continue

        self._call("delete", work)

    def abort_uploads(self, among: Callable[[str], bool] = lambda key: True) -> int:
        """Do nothing: fsspec does not list unfinished uploads."""
        return 0

    def _call(self, what: str, work: Callable[[Any, str], T], nbytes: int = 0) -> T:
        """Run a call in a thread that is abandoned if it does not return: some back ends have no time-outs at all."""
        outcome = in_background(lambda: work(*self._place), "storage-call")
        deadline_s = _DEADLINE_S + nbytes / _MIN_BYTES_PER_S
        if not wait([outcome], deadline_s).done:
            raise StorageTimeout(f"{what} at {self.location}: no answer for {deadline_s:.0f} s")
        try:
            return outcome.result()
        except StorageError:
            raise
        except Exception as error:
            if _is_away(error):
                raise StorageTimeout(f"{what} at {self.location}: {error or type(error).__name__}") from error
            raise StorageError(f"{what} at {self.location}: {error or type(error).__name__}") from error


def _is_away(error: Exception) -> bool:
    """Return whether a server cannot be reached, or has an error of its own; libraries name its status differently."""
    statuses = [getattr(error, name, None) for name in ("status", "status_code", "code")]
    is_status = any(isinstance(status, int) and (status >= 500 or status == 429) for status in statuses)
    return (
        is_status
        or isinstance(error, ConnectionError | TimeoutError)
        or (isinstance(error, OSError) and error.errno in PASSING_ERRNOS - _ANSWERS)
    )


def open_location(location: str) -> ObjectStorage:
    """Open the URL of any file system that fsspec knows; see `FilesystemStore`."""
    return ObjectStorage(FilesystemStore(location))
