"""Files and folders that survive a power cut: written and synced, replaced at once, or created once.

A file is written from memory with as little processor time as the file system allows. O_DIRECT (open(2)) moves
page-aligned memory to the disk without the page cache: no copy, and no write-back that competes with training. Several
writes are kept in flight to fill the disk's queue. Data that is unaligned, small, or on a file system without O_DIRECT
goes through the page cache, with write-back started early so that it does not pile up.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from checkpointing.format.digest import chunks
from checkpointing.host.own_files import ForeignLink, open_own

_BLOCK_BYTES = 4096
_PIECE_BYTES = 4 * 1024 * 1024
_IN_FLIGHT = 4
# Below this, opening the file twice costs more than the page cache does.
_MIN_DIRECT_BYTES = 1024 * 1024
_SYNC_EVERY_BYTES = 64 * 1024 * 1024
_libc = ctypes.CDLL(None, use_errno=True)


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def fsync_tree(folder: Path) -> None:
    """Make all files below a folder, and their names, durable."""
    for parent, _, files in os.walk(folder):
        for name in files:
            _fsync(Path(parent) / name, os.O_RDONLY)
        fsync_directory(Path(parent))


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(
    path: Path, data: bytes, temporary: Path, written: Callable[[], object] = lambda: None, *, private: bool = False
) -> None:
    """Replace a small file durably; a crash, or a disk that refuses (OSError), leaves the old contents or the new ones.

    Args:
        path: The file.
        data: Its new contents.
        temporary: Another name in the same directory that no other writer uses.
        written: Called when the new contents are durable under that name.
        private: Whether nobody else is to read it; see `own_files`.
    """
    try:
        _write_small(temporary, data, private=private)
        written()
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def create_file(path: Path, data: bytes, temporary: Path) -> bool:
    """Create a small file durably, whole or not at all, unless there is one of that name.

    The name is given by link(2), which of several writers exactly one can do, also over NFS. `temporary` is another
    name in the same directory that no other writer uses.

    Returns:
        Whether the file has these contents now.

    Raises:
        OSError: The disk refused.
    """
    try:
        _write_small(temporary, data, private=False)
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(temporary)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)
    # Over NFS a link may have been made whose answer was lost, and which the repeated call then finds.
    return path.read_bytes() == data


def _write_small(path: Path, data: bytes, *, private: bool) -> None:
    mode = None if private else 0o666
    try:
        if private:
            # One that is there may be readable by others, or belong to one of them.
            path.unlink(missing_ok=True)
        descriptor = open_own(path, os.O_WRONLY | os.O_CREAT, mode)
    except ForeignLink:
        # Only then: each call on the way to a commit is a step of its model.
        path.unlink(missing_ok=True)
        descriptor = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:  # noqa: PTH123 - of a descriptor
        os.ftruncate(descriptor, 0)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_file(path: Path, pieces: Iterable[memoryview]) -> int:
    """Create a file of these bytes and make it durable; return its size.

    Raises:
        OSError: The file exists, or the disk refused.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    return _write(path, descriptor, pieces, 0)


def write_range(path: Path, start: int, data: memoryview) -> None:
    """Write into a file that exists, from `start` on, and make that durable.

    Raises:
        OSError: There is no such file, or the disk refused.
    """
    _write(path, os.open(path, os.O_WRONLY), [data], start)


def _write(path: Path, descriptor: int, pieces: Iterable[memoryview], start: int) -> int:
    """Write an open file from a position on, and close it; return the position behind the last byte."""
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        direct: int | None = None
        pool: ThreadPoolExecutor | None = None
        position, unsynced = start, 0
        for piece in pieces:
            begin = 0
            if len(piece) >= _MIN_DIRECT_BYTES and position % _BLOCK_BYTES == 0 and _is_aligned(piece):
                if pool is None:
                    direct = _open_direct(path)
                    pool = stack.enter_context(ThreadPoolExecutor(_IN_FLIGHT, "checkpoint-direct"))
                    if direct is not None:
                        stack.callback(os.close, direct)
                if direct is not None:
                    _reserve(descriptor, position, len(piece))
                    begin = _write_direct(pool, direct, piece, position)
            for view in chunks(piece[begin:], _PIECE_BYTES):
                _write_all(descriptor, view, position + begin)
                begin += len(view)
                unsynced += len(view)
                if unsynced >= _SYNC_EVERY_BYTES:
                    os.fdatasync(descriptor)
                    unsynced = 0
            position += len(piece)
        os.fsync(descriptor)
        return position


def _write_direct(pool: ThreadPoolExecutor, descriptor: int, data: memoryview, position: int) -> int:
    """Write the whole blocks of `data`; return how many bytes were written, 0 if the file system declines."""
    nbytes = len(data) - len(data) % _BLOCK_BYTES
    starts = range(0, nbytes, _PIECE_BYTES)
    writes = [
        pool.submit(_write_all, descriptor, data[start : min(start + _PIECE_BYTES, nbytes)], position + start)
        for start in starts
    ]
    errors = [write.exception() for write in writes]
    for error in errors:
        if isinstance(error, OSError) and error.errno == errno.EINVAL:
            return 0
        if error is not None:
            raise error
    return nbytes


def _write_all(descriptor: int, view: memoryview, position: int) -> None:
    while len(view):
        written = os.pwrite(descriptor, view, position)
        view, position = view[written:], position + written


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise


def _reserve(descriptor: int, position: int, nbytes: int) -> None:
    """Allocate the blocks at once, so that a full disk is noticed now and the writes only fill them.

    The system call itself, because glibc's posix_fallocate writes zeros where the file system cannot reserve.
    """
    result = _libc.fallocate(descriptor, 0, ctypes.c_int64(position), ctypes.c_int64(nbytes))
    code = ctypes.get_errno() if result != 0 else 0
    if code not in (0, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code))


def _is_aligned(view: memoryview) -> bool:
    return not view.readonly and ctypes.addressof(ctypes.c_char.from_buffer(view)) % _BLOCK_BYTES == 0
