"""Memory, limits and clock of this node or container."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from checkpointing.host.memory import available_bytes, oom_groups
from runner.config.schema import Config
from runner.doctor.findings import Finding, fail, ok, warn
from runner.system.text import gb

SHARED_MEMORY = Path("/dev/shm")
# Docker gives a container 64 MB, which is too little for NCCL's buffers and DataLoader workers.
_SMALL_SHM_BYTES = 1 << 30
_MIN_FILES = 4096
# adjtimex(2) returns TIME_ERROR while the clock is not synchronised.
_TIME_ERROR = 5


def check_node(config: Config, num_ranks: int, has_gpus: bool, rank_bytes: int, state_bytes: int) -> Iterator[Finding]:
    """Check memory, limits and clock.

    Args:
        config: The run.
        num_ranks: Number of ranks on this node.
        has_gpus: Whether the ranks use GPUs.
        rank_bytes: Peak host memory of a rank in bytes, as `runner plan` estimates it.
        state_bytes: Size of a snapshot in bytes; two are kept in memory.
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
        f"{gb(available)} available (on the node, or within the container's limit); {num_ranks} ranks need about "
        f"{gb(ranks)}, two snapshots {gb(arenas)}"
    )
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
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _MIN_FILES:
        return warn("open files", f"{soft} per process", f"ulimit -n {min(max(hard, soft), 65536)}")
    return ok("open files", f"{soft} per process")


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
