"""Bandwidth of a local disk or an object store, measured."""

from __future__ import annotations

import mmap
import os
import shutil
import time
import uuid

from checkpointing.storage import LocalStorage
from checkpointing.storage.direct_io import write_file
from checkpointing.storage.object_store import ObjectStore, StorageError

_PROBE_BYTES = 256 * 1024 * 1024
_PIECE_BYTES = 32 * 1024 * 1024


def disk_rate(storage: LocalStorage, state_bytes: int) -> tuple[float, float]:
    """Bytes per second that are written and synced there (0: no room to try), and by how much its clock is off.

    Raises:
        OSError: the disk refused.
    """
    free = shutil.disk_usage(storage.root).free
    nbytes = min(_PROBE_BYTES, max(state_bytes, _PIECE_BYTES), free // 4) // mmap.PAGESIZE * mmap.PAGESIZE
    if nbytes < mmap.PAGESIZE:
        return 0.0, 0.0
    # Other machines' doctors are there, too.
    path = storage.root / f".doctor.{uuid.uuid4().hex}"
    try:
        with mmap.mmap(-1, nbytes) as buffer:
            # Not zeros: some file systems leave those out.
            block = os.urandom(min(nbytes, 1 << 20))
            buffer.write(block * (nbytes // len(block)))
            with memoryview(buffer) as view:
                began = time.monotonic()
                write_file(path, [view])
                seconds = time.monotonic() - began
        return nbytes / seconds, abs(path.stat().st_mtime - time.time())
    finally:
        path.unlink(missing_ok=True)


def object_rates(store: ObjectStore, state_bytes: int) -> tuple[float, float]:
    """Bytes per second that are put and got there.

    Raises:
        StorageError: refused, no answer, or other bytes come back than were put.
    """
    nbytes = min(_PROBE_BYTES, max(state_bytes, _PIECE_BYTES))
    piece, name = os.urandom(_PIECE_BYTES), f"probe/{uuid.uuid4().hex}"
    sizes = [min(_PIECE_BYTES, nbytes - start) for start in range(0, nbytes, _PIECE_BYTES)]
    target = bytearray(_PIECE_BYTES)
    try:
        began = time.monotonic()
        store.upload(name, [memoryview(piece)[:size] for size in sizes])
        put_s = time.monotonic() - began
        began = time.monotonic()
        for number, size in enumerate(sizes):
            store.read_into(name, number * _PIECE_BYTES, memoryview(target)[:size])
            if target[:size] != piece[:size]:
                raise StorageError(f"{store.location} gives back other bytes than were put there")
        return nbytes / put_s, nbytes / (time.monotonic() - began)
    finally:
        store.delete([name])
