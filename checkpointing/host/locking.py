"""A lock file that names its holder: flock(2), held as long as its descriptor is open in any process."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from checkpointing.host.own_files import open_own


def open_lock(path: Path) -> int:
    """Return a descriptor of the lock file; raises what `open_own` raises."""
    # Where a group shares the folder, another user of it continues the run: the umask decides.
    return open_own(path, os.O_RDWR | os.O_CREAT, 0o666)


def try_lock(fd: int) -> bool:
    """Take the lock and write this process's name into it; return False if another process holds it.

    Raises:
        OSError: The file system refuses locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    _sign(fd)
    return True


def wait_for_lock(fd: int) -> None:
    """Take the lock as soon as it is free, and write this process's name into it."""
    fcntl.flock(fd, fcntl.LOCK_EX)
    _sign(fd)


def holder(fd: int) -> str:
    """Return the name of the holder, `pid N on HOST`; "unknown" until the holder has written it."""
    return os.pread(fd, 200, 0).decode(errors="replace").strip() or "unknown"


def held_by(path: Path) -> str | None:
    """Return the `holder` of a lock that a process of this machine holds; None if none does, or it cannot be known.

    The lock is not touched: to try it would be in the way of a process that takes it at the same moment.
    """
    try:
        name, inode = path.read_text(errors="replace").strip(), path.stat().st_ino
        held = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    # 1: FLOCK  ADVISORY  WRITE 4711 08:02:131076 0 EOF
    ours = (line.split() for line in held if " FLOCK " in line)
    pids = {words[-4] for words in ours if words[-3].endswith(f":{inode}")}
    return name if any(name.startswith(f"pid {pid} on ") for pid in pids) else None


def is_elsewhere(name: str) -> bool:
    """Return whether a `holder` is on another machine."""
    return " on " in name and not name.endswith(f" on {this_machine()}")


def this_machine() -> str:
    """Return this machine's host name and boot id: a pod that was moved keeps its host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        boot = "unknown"
    return f"{socket.gethostname()} (boot {boot})"


def _sign(fd: int) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"pid {os.getpid()} on {this_machine()}\n".encode(), 0)
