"""How much memory snapshots may take, and on which NUMA nodes it is."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

# Without a configured limit, snapshots take at most this share of the memory available at the first one.
DEFAULT_SHARE = 0.5
# Version 2 and version 1: mount point, limit, usage, and the counter of the kernel's kills.
_CGROUPS = [
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "memory.events"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"),
]
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
# By machine: the numbers of get_mempolicy(2) and set_mempolicy(2), for which the C library has no functions.
_POLICY_CALLS = {"x86_64": (239, 238), "aarch64": (236, 237)}
_DEFAULT_POLICY, _INTERLEAVE = 0, 3
_ALLOWED_NODES = 4
_MAX_NODES = 1024
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def parse_bytes(text: str) -> int:
    """Parse `8GiB`, `500MB`, `8Gi` (as Kubernetes writes it) or plain bytes; raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"memory size {text!r} is not allowed: write bytes, or a number with MB, GB, MiB or GiB")
    return int(float(match.group(1)) * _UNITS[match.group(2).lower()])


def available_bytes() -> int:
    """Return the available memory of the machine, or of the container where that is less.

    The page cache counts as available: the kernel reclaims it.
    """
    text = Path("/proc/meminfo").read_text()
    match = re.search(r"MemAvailable:\s+(\d+) kB", text)
    available = int(match.group(1)) * 1024 if match else 0
    for folder, limit, usage, _ in _cgroups():
        with contextlib.suppress(OSError, ValueError):
            cache = _inactive_file(folder / "memory.stat")
            left = int((folder / limit).read_text()) - int((folder / usage).read_text()) + cache
            available = min(available, max(left, 0))
    return available


@contextlib.contextmanager
def interleaved() -> Iterator[None]:
    """Spread what this thread allocates inside over all NUMA nodes that it may use, in equal parts.

    Otherwise all of it is on the thread's own node, and the GPUs of other nodes copy across the link between
    processors. If the process was started with a policy (numactl), or the system refuses one (Docker's default seccomp
    profile), nothing changes.
    """
    numbers, libc = _POLICY_CALLS.get(platform.machine()), ctypes.CDLL(None)
    mode, nodes = ctypes.c_int(), (ctypes.c_ulong * (_MAX_NODES // _BITS))()
    is_set = False
    if numbers is not None:
        get_policy, set_policy = numbers
        has_own = libc.syscall(get_policy, ctypes.byref(mode), None, 0, None, 0) or mode.value != _DEFAULT_POLICY
        if not has_own and not libc.syscall(get_policy, None, nodes, _MAX_NODES, None, _ALLOWED_NODES):
            is_set = _has_several(nodes) and not libc.syscall(set_policy, _INTERLEAVE, nodes, _MAX_NODES)
    try:
        yield
    finally:
        if is_set:
            libc.syscall(set_policy, _DEFAULT_POLICY, None, 0)


def _has_several(nodes: Iterable[int]) -> bool:
    """Return whether more than one bit of a mask is set."""
    return sum(word.bit_count() for word in nodes) > 1


def oom_kills() -> int:
    """Return how many processes the kernel has killed because a cgroup of this process ran out of memory."""
    kills = 0
    for folder, *_, events in _cgroups():
        with contextlib.suppress(OSError, ValueError):
            match = re.search(r"^oom_kill (\d+)$", (folder / events).read_text(), re.MULTILINE)
            kills = max(kills, int(match.group(1))) if match else kills
    return kills


def oom_groups() -> list[Path]:
    """Return the files that make the kernel kill all processes of a cgroup of this process at once (cgroup v2).

    Since Kubernetes 1.28 the kubelet sets `memory.oom.group` for each container, unless its `singleProcessOOMKill` is
    set: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
    """
    files = []
    for folder, *_ in _cgroups():
        with contextlib.suppress(OSError):
            file = folder / "memory.oom.group"
            if file.read_text().strip() == "1" and file not in files:
                files.append(file)
    return files


def separate_oom_kills() -> None:
    """Make the kernel kill one process when this container runs out of memory, not all of them, where that is allowed.

    In most containers the files of `oom_groups` cannot be written, and nothing changes.
    """
    for file in oom_groups():
        # Without O_CREAT, so that nothing is created where a cgroup has been removed.
        with contextlib.suppress(OSError), file.open("r+b", buffering=0) as opened:
            opened.write(b"0")


def _cgroups() -> Iterator[tuple[Path, str, str, str]]:
    """Yield this process's memory cgroup and those above it, with the names of their files (cgroups(7))."""
    own = [""]
    with contextlib.suppress(OSError):
        lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
        own += [
            path.strip("/")
            for _, controllers, path in lines
            if controllers in ("", "memory") or "memory," in controllers
        ]
    for mount, *names in _CGROUPS:
        for path in dict.fromkeys(own):
            for folder in (mount / path, *(mount / path).parents):
                yield folder, names[0], names[1], names[2]
                if folder == mount:
                    break


def _inactive_file(stat: Path) -> int:
    fields = dict(line.split() for line in stat.read_text().splitlines())
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
