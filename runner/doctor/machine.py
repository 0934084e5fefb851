"""Memory, limits and clock of this machine or container."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from checkpointing.memory import available_bytes, oom_groups
from runner.config.schema import Config
from runner.doctor.findings import Finding, fail, ok, warn
from runner.text import gb

SHARED_MEMORY = Path("/dev/shm")
# What Docker gives a container; NCCL's buffers and DataLoader workers want more.
_SMALL_SHM_BYTES = 1 << 30
_MIN_FILES = 4096
# clock_adjtime(2): what adjtimex returns while nobody keeps the clock right.
_TIME_ERROR = 5


def check_machine(
    config: Config, num_ranks: int, has_gpus: bool, rank_bytes: int, state_bytes: int
) -> Iterator[Finding]:
    """Args:
    rank_bytes: what a rank's process takes of this machine's memory at its peak, as `runner plan` estimates it.
    state_bytes: of one snapshot; two are held.
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
    text = (
        f"{gb(available)} can be had (of the machine, or within the container's limit); {num_ranks} ranks want about "
        f"{gb(ranks)}, two snapshots {gb(arenas)}"
    )
    if available < ranks + state_bytes:
        mend = "raise the container's memory limit, or lower ranks per machine, micro-batch or max_length"
        yield fail("memory", text, mend)
    elif available < ranks + arenas:
        yield warn("memory", f"{text}: with less than two snapshots some are skipped", "raise the memory limit")
    else:
        yield ok("memory", text)
    limit = config.checkpoint.memory_limit_bytes
    if limit is not None and limit < arenas:
        text = f"{gb(limit)} is less than two snapshots, {gb(arenas)}"
        yield warn("checkpoint.memory_limit", text, "raise it; with one, saves are skipped; with none, they block")


def _shared_memory(config: Config, num_ranks: int, has_gpus: bool) -> Iterator[Finding]:
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        yield fail("/dev/shm", f"cannot be used: {error.strerror}", "mount a tmpfs there")
        return
    workers = int(config.trainer.get("dataloader_num_workers") or 0)
    text = f"{gb(usage.free)} free of {gb(usage.total)}"
    if usage.free >= _SMALL_SHM_BYTES:
        yield ok("/dev/shm", text)
        return
    users = [f"{workers} DataLoader workers per rank"] if workers else []
    users += ["NCCL between GPUs of this machine"] if has_gpus and num_ranks > 1 else []
    mend = "docker run --shm-size=8g; in Kubernetes an emptyDir of medium Memory at /dev/shm"
    if users:
        yield fail("/dev/shm", f"{text}, too little for {' and '.join(users)}", mend)
    else:
        yield warn("/dev/shm", f"{text}: DataLoader workers, or NCCL, would die of it (this job uses neither)", mend)


def _oom_groups() -> Iterator[Finding]:
    groups = oom_groups()
    fixed = [file for file in groups if not os.access(file, os.W_OK)]
    if fixed:
        text = f"short of memory, the kernel ends all processes of this container at once ({fixed[0]} is 1)"
        remedy = "set singleProcessOOMKill: true in the kubelet's configuration (Kubernetes 1.32 or newer)"
        yield warn("oom group", f"{text}: a rank takes runner and snapshots along", remedy)
    elif groups:
        yield ok("oom group", f"{groups[0]} is 1; the runner sets it to 0, so that one process is ended at a time")


def _memlock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok("memlock", "unlimited")
    text = f"{gb(soft)} may be locked"
    if Path("/dev/infiniband").exists():
        return fail(
            "memlock", f"{text}, and RDMA wants it unlimited", "ulimit -l unlimited; docker --ulimit memlock=-1"
        )
    return ok("memlock", f"{text}; enough without RDMA")


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _MIN_FILES:
        return warn("open files", f"{soft} per process", f"ulimit -n {min(max(hard, soft), 65536)}")
    return ok("open files", f"{soft} per process")


def _clock() -> Finding:
    libc = ctypes.CDLL(None, use_errno=True)
    # struct timex with modes = 0: only asks. 208 bytes on 64-bit Linux; the rest is room.
    buffer = ctypes.create_string_buffer(512)
    state = libc.adjtimex(buffer)
    if state == _TIME_ERROR:
        text = "the kernel does not know of anybody who keeps it right (NTP)"
        return warn("clock", text, "run chrony or systemd-timesyncd; S3 refuses clocks that are 15 min off")
    if state < 0:
        return ok("clock", f"not known: {os.strerror(ctypes.get_errno())}")
    return ok("clock", "kept right by NTP")
