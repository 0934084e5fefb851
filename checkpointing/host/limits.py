"""Limits of the machine that a process has met: which it was, its value, and how to raise it."""

from __future__ import annotations

import contextlib
import math
import re
import resource
from pathlib import Path

# What Python says; it has no type for it.
NO_THREAD = "can't start new thread"
_PROCESSES = re.compile(rf"{NO_THREAD}|Resource temporarily unavailable|pthread_create|unable to fork", re.I)
_FILES = re.compile(r"Too many open files|Failed to init uv loop", re.I)
_FILE_SIZE = re.compile(r"File too large", re.I)


def explained(text: str) -> str:
    """Return what to add to an error's text: the limit that it speaks of, and a remedy; empty if it speaks of none."""
    if _PROCESSES.search(text):
        return f"; {_of_processes()}"
    if _FILES.search(text):
        return f"; a process may open {_limit(resource.RLIMIT_NOFILE)} files (ulimit -n): raise that"
    if _FILE_SIZE.search(text):
        return f"; a file may have {_limit(resource.RLIMIT_FSIZE)} bytes (ulimit -f): raise that"
    return ""


def room_for_processes() -> float:
    """Return how many further processes and threads the nearest cgroup that limits them admits."""
    limit, count = _pids_cgroup()
    return limit - count


def raise_open_files(wanted: int = 65536) -> None:
    """Raise this process's limit of open files, which its children inherit, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _limit(kind: int) -> str:
    soft, _ = resource.getrlimit(kind)
    return "any number of" if soft == resource.RLIM_INFINITY else f"{soft:,}"


def _of_processes() -> str:
    limit, count = _pids_cgroup()
    user = f"this user may have {_limit(resource.RLIMIT_NPROC)} (ulimit -u)"
    if limit == math.inf:
        return f"{user}: raise that"
    own = f"this container may have {limit:.0f} processes and threads (pids.max), and has {count}"
    return f"{own}; {user}: raise the lower"


def _pids_cgroup() -> tuple[float, int]:
    """Return limit and number of the processes and threads of the nearest cgroup that limits them, else infinity."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "pids"):
                continue
            root = Path("/sys/fs/cgroup/pids" if controllers else "/sys/fs/cgroup")
            # In a container the path is that of the host, and the root is its own.
            own = root / path.lstrip("/")
            for folder in (own, *(above for above in own.parents if above.is_relative_to(root)), root):
                with contextlib.suppress(OSError):
                    limit = (folder / "pids.max").read_text().strip()
                    if limit != "max":
                        return int(limit), int((folder / "pids.current").read_text())
    return math.inf, 0
