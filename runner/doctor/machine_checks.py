"""Memory, limits and clock of this node or container, and access, bandwidth and space where checkpoints will be."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from checkpointing.errors import CheckpointError
from checkpointing.format.manifest import Manifest
from checkpointing.host.memory import available_bytes, oom_groups
from checkpointing.storage import LocalStorage, Storage
from runner.config.schema import Config
from runner.doctor.findings import Finding, fail, ok, warn
from runner.system.text import gb

SHARED_MEMORY = Path("/dev/shm")
# Docker gives a container 64 MB, which is too little for NCCL's buffers and DataLoader workers.
_SMALL_SHM_BYTES = 1 << 30
_MIN_FILES = 4096
# adjtimex(2) returns TIME_ERROR while the clock is not synchronised.
_TIME_ERROR = 5
_MAX_SKEW_S = 5.0
# A checkpoint has dozens of files, and a run's folder hundreds.
_MIN_INODES = 10_000
# Assumed number of checkpoints where save_total_limit is not set and the Trainer keeps all.
_DEFAULT_KEPT = 3


def check_node(config: Config, num_ranks: int, has_gpus: bool, rank_bytes: int, state_bytes: int) -> Iterator[Finding]:
    """Check memory, limits and clock.

    `runner plan` estimates the peak host memory of a rank, and the size of a snapshot, of which two are in memory. Both
    are 0 where they are not known, as for a script; the newest checkpoint has the size of its snapshots.
    """
    yield from _memory(config, num_ranks, rank_bytes, state_bytes)
    yield from _shared_memory(config, num_ranks, has_gpus)
    yield from _oom_groups()
    yield _memlock()
    yield _files()
    yield _clock()


def _memory(config: Config, num_ranks: int, rank_bytes: int, state_bytes: int) -> Iterator[Finding]:
    available = available_bytes()
    ranks, arenas = num_ranks * rank_bytes, 2 * state_bytes
    text = f"{gb(available)} available (on the node, or within the container's limit)"
    if rank_bytes:
        text += f"; {num_ranks} ranks need about {gb(ranks)}, two snapshots {gb(arenas)}"
    elif state_bytes:
        text += f"; two snapshots need {gb(arenas)}, and what the ranks need is not known before they run"
    else:
        text += "; what the ranks and two snapshots need is not known before they run"
    if available < ranks + state_bytes:
        fix = "raise the container's memory limit, or lower ranks per node, micro-batch or max_length"
        yield fail("memory", text, fix)
    elif available < ranks + arenas:
        yield warn("memory", f"{text}; without room for two, some snapshots are skipped", "raise the memory limit")
    else:
        yield ok("memory", text)
    limit = config.checkpoint.memory_limit_bytes
    if limit is not None and limit < arenas:
        text = f"{gb(limit)} is less than two snapshots, {gb(arenas)}"
        yield warn(
            "checkpoint.memory_limit",
            text,
            "raise it; with room for one, saves are skipped; with room for none, they block training",
        )


def _shared_memory(config: Config, num_ranks: int, has_gpus: bool) -> Iterator[Finding]:
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        yield fail("/dev/shm", f"not usable: {error.strerror}", "mount a tmpfs there")
        return
    workers = int(config.trainer.get("dataloader_num_workers") or 0)
    text = f"{gb(usage.free)} free of {gb(usage.total)}"
    if usage.free >= _SMALL_SHM_BYTES:
        yield ok("/dev/shm", text)
        return
    users = [f"{workers} DataLoader workers per rank"] if workers else []
    users += ["NCCL between the GPUs of this node"] if has_gpus and num_ranks > 1 else []
    fix = "docker run --shm-size=8g; in Kubernetes, mount an emptyDir with medium Memory at /dev/shm"
    if users:
        yield fail("/dev/shm", f"{text}, too little for {' and '.join(users)}", fix)
    else:
        yield warn("/dev/shm", f"{text}: too little for DataLoader workers or NCCL (this job uses neither)", fix)


def _oom_groups() -> Iterator[Finding]:
    groups = oom_groups()
    fixed = [file for file in groups if not os.access(file, os.W_OK)]
    if fixed:
        text = f"out of memory, the kernel would kill all processes of this container at once ({fixed[0]} is 1)"
        fix = "set singleProcessOOMKill: true in the kubelet's configuration (Kubernetes 1.32 or newer)"
        yield warn("oom group", f"{text}, including the runner and its snapshots", fix)
    elif groups:
        yield ok(
            "oom group", f"{groups[0]} is 1; the runner sets it to 0, so that the kernel kills one process at a time"
        )


def _memlock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok("memlock", "unlimited")
    text = f"{gb(soft)}"
    if Path("/dev/infiniband").exists():
        return fail(
            "memlock", f"{text}, but RDMA needs it unlimited", "ulimit -l unlimited; docker --ulimit memlock=-1"
        )
    return ok("memlock", f"{text}; enough without RDMA")


def _files() -> Finding:
    # A start raises its own limit as far as this.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return ok("open files", "unlimited")
    if hard < _MIN_FILES:
        return warn("open files", f"{hard} per process at most", "raise the hard limit: ulimit -Hn 65536, as root")
    return ok("open files", f"{hard} per process at most")


def _clock() -> Finding:
    libc = ctypes.CDLL(None, use_errno=True)
    # struct timex, 208 bytes on 64-bit Linux, all zero: modes = 0 only reads.
    buffer = ctypes.create_string_buffer(512)
    state = libc.adjtimex(buffer)
    if state == _TIME_ERROR:
        text = "the system clock is not synchronised (no NTP)"
        return warn(
            "clock", text, "run chrony or systemd-timesyncd; S3 rejects requests from clocks that are 15 min off"
        )
    if state < 0:
        return ok("clock", f"state unknown: {os.strerror(ctypes.get_errno())}")
    return ok("clock", "synchronised by NTP")


def nearest_folder(path: Path) -> Path:
    """Return the folder that exists, of a path and those above it: what is made there goes by its rules."""
    return next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))


def newest_bytes(storage: Storage) -> int:
    """Return the size of the newest whole checkpoint there; 0 where there is none. OSError if storage refuses."""
    return next((found.total_bytes for _, found in storage.survey() if isinstance(found, Manifest)), 0)


def check_locations(config: Config, state_bytes: int | None, kept: int | None) -> Iterator[Finding]:
    """Try a commit at each tier, and compare its space with what the checkpoints need; nothing is left there.

    Args:
        config: The configuration.
        state_bytes: Size of a checkpoint, for which the bandwidth is measured, too; None if it is not known: then the
            newest one tells.
        kept: Checkpoints that the job keeps; None if it is not known.
    """
    tiers = config.tiers
    for storage in tiers.nearest_first:
        key = "checkpoint.location" if storage is tiers.durable else "checkpoint.local_tier"
        num = (kept or _DEFAULT_KEPT) if storage is tiers.durable else config.checkpoint.local_keep_last
        place = storage
        if storage.root is not None and (folder := nearest_folder(storage.root)) != storage.root:
            # A start makes the location's folder; a check makes none.
            place = LocalStorage(folder)
        try:
            caveat = place.probe()
            if caveat is not None:
                yield warn(key, caveat, "make sure that only one runner at a time uses it")
            above = f" in {place.location}, the folder that exists" if place is not storage else ""
            yield ok(key, f"{storage.location}: a commit was tried{above}, read back and removed{_on(place)}")
            yield from _inodes(key, place)
            size = newest_bytes(storage) if state_bytes is None else state_bytes
            yield from _free_space(key, storage.location, place.free_bytes(), size, num)
            if state_bytes is not None:
                yield from _bandwidth(key, place, state_bytes)
        except (CheckpointError, OSError) as error:
            text = getattr(error, "strerror", None) or str(error)
            yield fail(key, f"{storage.location} cannot be used: {text}", "fix the cause, or set another location")


def check_folder(folder: Path) -> Iterator[Finding]:
    """Check that the folder of a run can be made and written; nothing is left there."""
    key, place = "output_dir", LocalStorage(nearest_folder(folder))
    try:
        place.probe()
        yield ok(key, f"{folder} can be written{_on(place)}")
        yield from _inodes(key, place)
    except OSError as error:
        fix = "correct its permissions, or choose another --output-dir"
        yield fail(key, f"{str(folder)!r} cannot be used: {error.strerror or error}", fix)


def _on(place: Storage) -> str:
    """Return the kind of file system that a directory is on, as a clause."""
    if place.root is None:
        return ""
    path = place.root.resolve()
    found = [one for one in psutil.disk_partitions(all=True) if path.is_relative_to(one.mountpoint)]
    return f" ({max(found, key=lambda one: len(one.mountpoint)).fstype})" if found else ""


def _inodes(key: str, place: Storage) -> Iterator[Finding]:
    if place.root is None:
        return
    status = os.statvfs(place.root)
    # Some file systems, such as btrfs, do not count them.
    if status.f_files and status.f_favail < _MIN_INODES:
        yield warn(key, f"{status.f_favail} inodes are free at {place.root}", "remove files (df -i)")


def _free_space(key: str, location: str, free: int | None, state_bytes: int, kept: int) -> Iterator[Finding]:
    if free is None:
        return
    if not state_bytes:
        yield ok(key, f"{gb(free)} free at {location}; no checkpoint says yet how much each needs")
        return
    # A new checkpoint is written before the oldest one is removed.
    needed = (kept + 1) * state_bytes
    text = f"{gb(free)} free at {location}; {kept} checkpoints and one being written need {gb(needed)}"
    if free < 2 * state_bytes:
        yield fail(key, text, "free space, or set another location")
    elif free < needed:
        yield warn(key, text, "free space, or lower trainer.save_total_limit")
    else:
        yield ok(key, text)


def _bandwidth(key: str, storage: Storage, state_bytes: int) -> Iterator[Finding]:
    rates = storage.measure(state_bytes)
    if rates is None:
        return
    took = f"a checkpoint of {gb(state_bytes)} takes {state_bytes / rates.write:.2f} s"
    if rates.read is None:
        yield ok(f"{key} bandwidth", f"writes and syncs {rates.write / 1e6:.0f} MB/s: {took}")
    else:
        fences = "fences off" if storage.decides_between_writers else "cannot fence off"
        speed = f"writes {rates.write / 1e6:.0f} MB/s, reads {rates.read / 1e6:.0f} MB/s"
        yield ok(key, f"{storage.location} {speed}, and {fences} concurrent writers: {took}")
    if rates.clock_skew_s > _MAX_SKEW_S:
        text = f"the clocks of the file server and of this node differ by {rates.clock_skew_s:.0f} s"
        yield warn("clock", text, "synchronise both with NTP")
