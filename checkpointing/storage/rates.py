"""Trials of a place for checkpoints: the names of what they write there, and the bandwidth that they measure."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from checkpointing.storage.durable import write_file
from checkpointing.storage.object_store import ObjectStore, StorageError

# Enough to get past the caches of a disk's controller, little enough to take seconds.
_PROBE_BYTES = 256 * 1024 * 1024
_PIECE_BYTES = 32 * 1024 * 1024
# What a trial writes has one of these names, which no reader takes for anything else: `.probe.` in a directory, where
# a dot hides it, and `probe/` in an object store.
_TRIAL = re.compile(r"(?:\.probe\.|probe/)([0-9]{1,12})-[0-9a-f]{32}(?:\.tmp)?\Z")
# No trial takes this long: what is older was left by a process that was killed. Clocks of nodes may differ.
_DEAD_S = 3600


def trial_name(prefix: str) -> str:
    """Return a name that no other trial uses; pods that share a volume have the same process numbers.

    The prefix is `.probe.` or `probe/`. The name says when it was made, so that a later trial removes what was left.
    """
    return f"{prefix}{time.time():.0f}-{uuid.uuid4().hex}"


def dead_trials(names: Iterable[str], now: float) -> list[str]:
    """Return those of the names that a killed trial has left."""
    return [name for name in names if (match := _TRIAL.match(name)) and int(match.group(1)) < now - _DEAD_S]


@dataclass(frozen=True)
class Rates:
    """What was measured at a location.

    Attributes:
        write: Bytes per second that become durable.
        read: Bytes per second that are read back; None where that would measure a cache.
        clock_skew_s: Seconds between this machine's clock and the storage's; 0 where the storage does not tell.
    """

    write: float
    read: float | None = None
    clock_skew_s: float = 0.0


def measure_directory(root: Path, checkpoint_bytes: int) -> Rates | None:
    """Write a file of at most a checkpoint's size, sync it, and remove it; return None where there is no room for it.

    Raises:
        OSError: The disk refused.
    """
    free = shutil.disk_usage(root).free
    nbytes = min(_PROBE_BYTES, max(checkpoint_bytes, _PIECE_BYTES), free // 4) // mmap.PAGESIZE * mmap.PAGESIZE
    if nbytes < mmap.PAGESIZE:
        return None
    path = root / trial_name(".probe.")
    try:
        with mmap.mmap(-1, nbytes) as buffer:
            # Some file systems do not store zeros.
            block = os.urandom(min(nbytes, 1 << 20))
            buffer.write(block * (nbytes // len(block)))
            with memoryview(buffer) as view:
                began = time.monotonic()
                write_file(path, [view])
                seconds = time.monotonic() - began
        return Rates(nbytes / seconds, clock_skew_s=abs(path.stat().st_mtime - time.time()))
    finally:
        path.unlink(missing_ok=True)


def measure_objects(store: ObjectStore, checkpoint_bytes: int) -> Rates:
    """Upload an object of at most a checkpoint's size, read it back, and delete it.

    Raises:
        StorageError: The store refused, did not answer, or returned other bytes than were uploaded.
    """
    nbytes = min(_PROBE_BYTES, max(checkpoint_bytes, _PIECE_BYTES))
    piece, name = os.urandom(_PIECE_BYTES), trial_name("probe/")
    sizes = [min(_PIECE_BYTES, nbytes - start) for start in range(0, nbytes, _PIECE_BYTES)]
    target = bytearray(_PIECE_BYTES)
    try:
        began = time.monotonic()
        store.upload(name, [memoryview(piece)[:size] for size in sizes])
        upload_s = time.monotonic() - began
        began = time.monotonic()
        for number, size in enumerate(sizes):
            store.read_into(name, number * _PIECE_BYTES, memoryview(target)[:size])
            if target[:size] != piece[:size]:
                raise StorageError(f"{store.location} returned other bytes than were uploaded there")
        return Rates(nbytes / upload_s, nbytes / (time.monotonic() - began))
    finally:
        store.delete([name])
