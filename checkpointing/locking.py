"""A lock file that says who holds it: flock(2), held as long as its descriptor is open, by whatever process."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path


def open_lock(path: Path) -> int:
    """The descriptor to lock.

    Raises:
        OSError: the file cannot be written.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def try_lock(fd: int) -> bool:
    """Take the lock and sign it; False where somebody holds it.

    Raises:
        OSError: the file system refuses locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    _sign(fd)
    return True


def wait_for_lock(fd: int) -> None:
    """Take it as soon as it is free, and sign it."""
    fcntl.flock(fd, fcntl.LOCK_EX)
    _sign(fd)


def holder(fd: int) -> str:
    """Who has signed it: `pid N on HOST`; "unknown" in the moment before."""
    return os.pread(fd, 200, 0).decode(errors="replace").strip() or "unknown"


def is_elsewhere(name: str) -> bool:
    """Whether a `holder` is on another machine."""
    return " on " in name and not name.endswith(f" on {this_machine()}")


def this_machine() -> str:
    """Its name and what tells it apart from another one of that name: a pod that was moved keeps its host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        boot = "unknown"
    return f"{socket.gethostname()} (boot {boot})"


def _sign(fd: int) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"pid {os.getpid()} on {this_machine()}\n".encode(), 0)
