"""How much memory snapshots may take."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

# Without a limit of the user's, snapshots take at most this share of the memory that is free when they are first made.
DEFAULT_SHARE = 0.5
_CGROUP_FILES = [
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
]
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int:
    """`8GiB`, `500MB`, `8Gi` (as Kubernetes writes it) or plain bytes, as a number of bytes.

    Raises:
        ValueError: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"memory size {text!r} is not allowed: write bytes, or a number with MB, GB, MiB or GiB")
    return int(float(match.group(1)) * _UNITS[match.group(2).lower()])


def available_bytes() -> int:
    """Memory that can still be had: the machine's, or the container's where that is less.

    The page cache counts as free: the kernel gives it back.
    """
    text = Path("/proc/meminfo").read_text()
    match = re.search(r"MemAvailable:\s+(\d+) kB", text)
    available = int(match.group(1)) * 1024 if match else 0
    for limit_file, usage_file in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):
            cache = _inactive_file(usage_file.with_name("memory.stat"))
            left = int(limit_file.read_text()) - int(usage_file.read_text()) + cache
            available = min(available, max(left, 0))
    return available


def _inactive_file(stat: Path) -> int:
    fields = dict(line.split() for line in stat.read_text().splitlines())
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
