"""Reads a file image once: into memory of our own while it is digested, or in place where nobody will write to it."""

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

from checkpointing.digest import RunningDigest, digest_file
from checkpointing.storage.base import RemoteFile

_PIECE_BYTES = 8 * 1024 * 1024
_READERS = 8


class MemoryFile(io.RawIOBase):
    """A read-only file over a buffer, without a copy of it."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._buffer)}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, target: object) -> int:
        view = memoryview(target).cast("B")  # type: ignore[arg-type]
        data = self._buffer[self._position : self._position + len(view)]
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def digest_of(source: Path | RemoteFile) -> str:
    """Digest of a file, as `algorithm:hex`; through a window of memory where it is not on this machine.

    Raises:
        OSError: it cannot be read.
    """
    if isinstance(source, Path):
        return digest_file(source)
    digest = RunningDigest()
    windows = [memoryview(bytearray(_PIECE_BYTES)) for _ in range(_READERS)]
    with ThreadPoolExecutor(_READERS, "checkpoint-read") as pool:
        ahead: deque[tuple[memoryview, Future[None]]] = deque()

        def take() -> None:
            piece, read = ahead.popleft()
            read.result()
            digest.update(piece)

        for number, start in enumerate(range(0, source.nbytes, _PIECE_BYTES)):
            if len(ahead) == _READERS:
                take()
            piece = windows[number % _READERS][: source.nbytes - start]
            ahead.append((piece, pool.submit(source.read_into, start, piece)))
        while ahead:
            take()
    return digest.result()


def read_private(source: Path | RemoteFile | memoryview) -> tuple[memoryview, str]:
    """A copy of a file's or a buffer's bytes that is the caller's own, and their digest.

    Reading runs ahead of the digest, in threads; each byte is read once.

    Raises:
        OSError: the file cannot be read.
    """
    with _reader(source) as (nbytes, read):
        digest = RunningDigest()
        if nbytes == 0:
            return memoryview(b""), digest.result()
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Fewer page faults, where the machine has huge pages.
        memory.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(memory)
        starts = range(0, nbytes, _PIECE_BYTES)
        with ThreadPoolExecutor(_READERS, "checkpoint-read") as pool:
            ahead: deque[Future[None]] = deque()
            for start in starts:
                ahead.append(pool.submit(read, start, view[start : start + _PIECE_BYTES]))
            for start in starts:
                ahead.popleft().result()
                digest.update(view[start : start + _PIECE_BYTES])
        return view, digest.result()


def read_shared(source: Path | RemoteFile | memoryview) -> tuple[memoryview, str]:
    """A file's or a buffer's bytes where they lie, not to be written to, and their digest.

    What is not on this machine is read into memory.

    Raises:
        OSError: the file cannot be read.
    """
    if not isinstance(source, (Path, memoryview)):
        return read_private(source)
    if isinstance(source, Path):
        with source.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                source = memoryview(b"")
            else:
                # A private mapping, so that an accident cannot reach the file.
                mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                mapped.madvise(mmap.MADV_WILLNEED)
                source = memoryview(mapped)
    digest = RunningDigest()
    digest.update(source)
    return source, digest.result()


@contextmanager
def _reader(source: Path | RemoteFile | memoryview) -> Iterator[tuple[int, Callable[[int, memoryview], None]]]:
    if isinstance(source, memoryview):
        buffer = source
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if len(buffer) else 0

        def copy(start: int, target: memoryview) -> None:
            # Through ctypes, which lets the other threads run meanwhile.
            ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(target)), address + start, len(target))

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
