"""Reads a file image once: into private memory while it is digested, or in place where nothing will write to it."""

from __future__ import annotations

import ctypes
import io
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from checkpointing.errors import AWAY_ERRNOS, CheckpointError, InvalidCheckpoint, StorageUnreachable
from checkpointing.format.digest import ALGORITHM, RunningDigest, digest_file
from checkpointing.host.shared_memory import populate_pages
from checkpointing.storage.base import RemoteFile
from checkpointing.storage.object_store import ObjectMissing, StorageError

# Smaller ones cost a server and us more processor time, larger ones the time of the last ones, which are read alone.
_PIECE_BYTES = 16 * 1024 * 1024
_READERS = 8
# Of a buffer, from where its pages are mapped to the copy into them: they are still in the cache of the core.
_MAPPED_BYTES = 256 * 1024
# Of a part that is waited for.
_RANGE_BYTES = 8 * 1024 * 1024


class MemoryFile(io.RawIOBase):
    """A read-only file over a buffer, without a copy of it."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, origin: int = os.SEEK_SET, /) -> int:
        """Change the position, and return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._buffer)}[origin]
        self._position = max(base + offset, 0)
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readinto(self, target: object) -> int:
        """Copy bytes from the position on, and return how many there were."""
        view = memoryview(target).cast("B")  # type: ignore[arg-type]
        data = self._buffer[self._position : self._position + len(view)]
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def fault(label: str, name: str, error: OSError) -> CheckpointError:
    """Return the error to raise for a checkpoint, one of whose files could not be read."""
    reason = f"{name} cannot be read ({error.strerror or error})"
    is_refused = error.errno in AWAY_ERRNOS or isinstance(error, PermissionError)
    if is_refused or (isinstance(error, StorageError) and not isinstance(error, ObjectMissing)):
        return StorageUnreachable(f"{label}: {reason}")
    return InvalidCheckpoint(label, reason)


def pieces_of(source: Path | RemoteFile) -> Iterator[memoryview]:
    """Yield a file's bytes in order, read ahead by threads into a window of memory; a piece lasts until the next one.

    Raises:
        OSError: It cannot be read.
    """
    with _reader(source) as (nbytes, read):
        # Most files of a checkpoint are small: no more memory than the file needs.
        num_windows = min(_READERS, -(-nbytes // _PIECE_BYTES))
        windows = [memoryview(bytearray(min(_PIECE_BYTES, nbytes))) for _ in range(num_windows)]
        yield from _read_ahead(nbytes, read, lambda start: windows[start // _PIECE_BYTES % _READERS])


def digest_of(source: Path | RemoteFile, algorithm: str = ALGORITHM) -> str:
    """Return the digest of a file as `algorithm:hex`.

    Raises:
        OSError: it cannot be read.
    """
    if isinstance(source, Path):
        return digest_file(source, algorithm)
    digest = RunningDigest(algorithm)
    for piece in pieces_of(source):
        digest.update(piece)
    return digest.result()


def private_memory(nbytes: int, enough: Callable[[], bool] = lambda: False) -> memoryview:
    """Allocate private memory.

    Args:
        nbytes: Its size.
        enough: Asked from time to time; once true, the rest of the pages are mapped when they are used.

    Returns:
        The memory.
    """
    if nbytes == 0:
        return memoryview(b"")
    # Not in huge pages: free ones are what a virtual machine has given back to its host, or the kernel moves others to
    # make room (1.5 s for 670 MB, otherwise 0.03 s; small ones always 0.2 s).
    memory = memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    populate_pages(_address(memory), nbytes, enough)
    return memory


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def read_private(
    source: Path | RemoteFile | memoryview, memory: memoryview | None = None, algorithm: str | None = ALGORITHM
) -> tuple[memoryview, str]:
    """Copy a file's or a buffer's bytes into private memory.

    Threads read ahead of the digest; each byte is read once.

    Args:
        source: The file or the buffer.
        memory: Where to copy to; None to allocate it.
        algorithm: Algorithm of the digest; None for no digest.

    Returns:
        The copy and its digest.

    Raises:
        OSError: The file cannot be read, or has another size than the memory.
    """
    digest = RunningDigest(algorithm) if algorithm is not None else None
    with _reader(source) as (nbytes, read):
        target = memory if memory is not None else private_memory(nbytes, enough=lambda: True)
        if nbytes != len(target):
            raise OSError(0, f"it has {nbytes} bytes, not {len(target)}")
        fill = _mapping_first(read, _MAPPED_BYTES if isinstance(source, memoryview) else _PIECE_BYTES)
        for piece in _read_ahead(nbytes, fill, lambda start: target[start : start + _PIECE_BYTES]):
            if digest is not None:
                digest.update(piece)
    return target, digest.result() if digest is not None else ""


def _mapping_first(read: Callable[[int, memoryview], None], nbytes: int) -> Callable[[int, memoryview], None]:
    """Return `read` that maps so much of its target at once before it fills that.

    Page faults during the copy would cost ten times as much; and the threads that read map in parallel.
    """

    def fill(start: int, target: memoryview) -> None:
        for first in range(0, len(target), nbytes):
            part = target[first : first + nbytes]
            populate_pages(_address(part), len(part))
            read(start + first, part)

    return fill


def read_shared(source: Path | RemoteFile | memoryview, algorithm: str | None = ALGORITHM) -> tuple[memoryview, str]:
    """Return a file's or a buffer's bytes without a copy, and their digest, empty if `algorithm` is None.

    They must not be written to. A file that is not on this machine is read into memory.

    Raises:
        OSError: The file cannot be read.
    """
    if not isinstance(source, (Path, memoryview)):
        return read_private(source, algorithm=algorithm)
    if isinstance(source, Path):
        with source.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                source = memoryview(b"")
            else:
                # A private mapping, so that a stray write cannot reach the file.
                mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                mapped.madvise(mmap.MADV_WILLNEED)
                source = memoryview(mapped)
    if algorithm is None:
        return source, ""
    digest = RunningDigest(algorithm)
    digest.update(source)
    return source, digest.result()


def reading_at(source: Path | RemoteFile | memoryview) -> Callable[[int, memoryview], None]:
    """Return a function that fills memory with a file's or a buffer's bytes from a place on; it may raise OSError."""

    def read_into(start: int, target: memoryview) -> None:
        with _reader(source) as (_, read):
            if isinstance(source, (Path, memoryview)) or len(target) <= _RANGE_BYTES:
                read(start, target)
                return
            # One connection to a server is far slower than several.
            starts = range(0, len(target), _RANGE_BYTES)
            with ThreadPoolExecutor(len(starts), "checkpoint-read") as pool:
                list(pool.map(lambda first: read(start + first, target[first : first + _RANGE_BYTES]), starts))

    return read_into


def _read_ahead(
    nbytes: int, read: Callable[[int, memoryview], None], memory_for: Callable[[int], memoryview]
) -> Iterator[memoryview]:
    """Yield the pieces in order, each read into the memory for its start, while the next `_READERS` are being read."""
    ahead: deque[tuple[memoryview, Future[None]]] = deque()

    def oldest() -> memoryview:
        piece, done = ahead.popleft()
        done.result()
        return piece

    with ThreadPoolExecutor(_READERS, "checkpoint-read") as pool:
        for start in range(0, nbytes, _PIECE_BYTES):
            piece = memory_for(start)[: nbytes - start]
            ahead.append((piece, pool.submit(read, start, piece)))
            if len(ahead) == _READERS:
                yield oldest()
        while ahead:
            yield oldest()


@contextmanager
def _reader(source: Path | RemoteFile | memoryview) -> Iterator[tuple[int, Callable[[int, memoryview], None]]]:
    if isinstance(source, memoryview):
        buffer = source
        address = _address(buffer) if len(buffer) else 0

        def copy(start: int, target: memoryview) -> None:
            # ctypes releases the interpreter lock.
            ctypes.memmove(_address(target), address + start, len(target))

        yield len(buffer), copy
        return
    if not isinstance(source, Path):
        yield source.nbytes, source.read_into
        return
    descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:

        def read(start: int, target: memoryview) -> None:
            while len(target):
                count = os.preadv(descriptor, [target], start)
                if count == 0:
                    raise OSError(0, "it became shorter while it was read")
                target, start = target[count:], start + count

        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        yield os.fstat(descriptor).st_size, read
    finally:
        os.close(descriptor)
