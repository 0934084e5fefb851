"""Shared memory between ranks and agent: arenas that hold snapshots, and the page that holds heartbeats and flags.

Both are memfds (memfd_create(2)): anonymous, freed with their last user, and not limited by the 64 MB of a pod's
`/dev/shm`. The agent creates them and passes the descriptors over its socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Iterable

from checkpointing.host.memory import interleaved
from checkpointing.host.threads import side_by_side

PAGE_BYTES = mmap.PAGESIZE
# madvise(2), Linux 5.14. Existing pages are mapped three times faster for reading, and can be written to all the same.
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_POPULATED_AT_ONCE = 64 * 1024 * 1024
# Of a process: each maps some 10 GB/s that exist.
_POPULATING_THREADS = 4
_libc = ctypes.CDLL(None, use_errno=True)


def round_up(nbytes: int) -> int:
    """Return the size of the pages that hold so many bytes."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def place_on_pages(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Place parts of some sizes one after the other, each on a page; return their offsets, and the bytes needed."""
    offsets, end = [], 0
    for nbytes in sizes:
        offsets.append(end)
        end += round_up(max(nbytes, 1))
    return offsets, end


def populate_pages(
    address: int, nbytes: int, enough: Callable[[], bool] = lambda: False, *, shared: bool = False
) -> bool:
    """Allocate and map every page of memory before it is used; return False if the kernel does not support it.

    Args:
        address: Of the memory.
        nbytes: Its size.
        enough: Asked from time to time; once true, the rest of the pages are mapped when they are used.
        shared: Whether it is memory of a memfd whose pages exist.
    """
    how = _MADV_POPULATE_READ if shared else _MADV_POPULATE_WRITE
    for start in range(0, nbytes, _POPULATED_AT_ONCE):
        if enough():
            break
        place, size = ctypes.c_void_p(address + start), ctypes.c_size_t(min(_POPULATED_AT_ONCE, nbytes - start))
        # ctypes releases the interpreter lock.
        if _libc.madvise(place, size, how) != 0:
            return False
    return True


class SharedMemory:
    """A mapped memfd. `buffer` is writable and lives until `close`; pages are mapped at first use, or by `populate`."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        # A rank that dumps core must not write a copy of the model first (an abort of NCCL wrote 60 GB).
        self._map.madvise(mmap.MADV_DONTDUMP)
        self.buffer = memoryview(self._map)
        self._populated = False

    def populate(self) -> None:
        """Map every page, writable, so that the first snapshot meets no page fault."""
        if self._populated:
            return
        self._populated = True
        number = max(min(_POPULATING_THREADS, os.cpu_count() or 1, self.nbytes // _POPULATED_AT_ONCE), 1)
        share = round_up(-(-self.nbytes // number))
        parts = [(self.address + start, min(share, self.nbytes - start)) for start in range(0, self.nbytes, share)]
        populate = functools.partial(populate_pages, shared=True)
        outcomes = side_by_side([functools.partial(populate, *part) for part in parts], "checkpoint-map")
        if not all(outcome.result() for outcome in outcomes):
            # Older kernels: touch every page.
            sum(self.buffer[::PAGE_BYTES])

    @property
    def address(self) -> int:
        """Address at which it is mapped in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def create(cls, name: str, nbytes: int) -> SharedMemory:
        """Allocate `nbytes`, rounded up to pages; raises OSError where they are not available."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            size = round_up(nbytes)
            os.ftruncate(fd, size)
            # Reserve now: a full memory then fails here with ENOSPC instead of killing a rank with SIGBUS later.
            with interleaved():
                os.posix_fallocate(fd, 0, size)
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> SharedMemory:
        """Map a descriptor that another process sent; takes over the descriptor."""
        return cls(fd, os.fstat(fd).st_size)

    def close(self) -> None:
        """Unmap; where views are still in use, the memory is unmapped with the last of them."""
        with contextlib.suppress(BufferError):
            self.buffer.release()
            self._map.close()
        os.close(self.fd)
