"""The lock that lets one agent at a time write to a local location."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from checkpointing.errors import PASSING_ERRNOS
from checkpointing.host import locking

LOCK_NAME = ".agent.lock"
# How long a new agent waits for the one before it to finish its last commit.
LOCK_TIMEOUT_S = 120.0
_RETRY_S = 0.5
# One that has ended its training commits its last checkpoint meanwhile.
_SILENCE_S = 2.0


def acquire_lock(
    root: Path, timeout_s: float, *, patience_s: float = 0.0, wait: Callable[[float], None] = time.sleep
) -> int:
    """Become the only agent of a location.

    An agent of this machine that keeps the lock belongs to a run that must be stopped. One of another machine may
    belong to a node that the cluster has replaced: fences protect against it, and they work without the lock.

    Args:
        root: The location's directory.
        timeout_s: Seconds to wait for the lock.
        patience_s: Seconds for which a directory that cannot be written is tried again.
        wait: Waits for some seconds.

    Returns:
        The descriptor that holds the lock until it is closed.

    Raises:
        TimeoutError: Another agent of this machine keeps it.
        OSError: The directory cannot be written.
    """
    fd, is_taken = _open_and_try(root, patience_s, wait)
    began, is_silent = time.monotonic(), True
    while not (is_taken or locking.try_lock(fd)):
        waited_s = time.monotonic() - began
        if is_silent and waited_s > _SILENCE_S:
            is_silent = False
            text = f"checkpoint agent: waiting for another one ({locking.holder(fd)}), which writes to {root}"
            print(f"{text}; for {timeout_s:.0f} s at most", file=sys.stderr, flush=True)
        if waited_s > timeout_s:
            holder = locking.holder(fd)
            if locking.is_elsewhere(holder):
                # Taken as soon as it is free, so that the next agent of this machine waits for this one.
                threading.Thread(target=_hold_lock, args=(fd,), name="checkpoint-lock", daemon=True).start()
                return fd
            os.close(fd)
            raise TimeoutError(
                f"another checkpoint agent ({holder}) has held {root} for {timeout_s:.0f} s; "
                "stop that run, or choose another output_dir"
            )
        time.sleep(0.05)
    return fd


def _open_and_try(root: Path, patience_s: float, wait: Callable[[float], None]) -> tuple[int, bool]:
    """Return a descriptor of the lock file, and whether the lock was free and is taken."""
    deadline, is_silent = time.monotonic() + patience_s, True
    while True:
        fd = None
        try:
            root.mkdir(parents=True, exist_ok=True)
            fd = locking.open_lock(root / LOCK_NAME)
            return fd, locking.try_lock(fd)
        except OSError as error:
            if fd is not None:
                os.close(fd)
            if error.errno not in PASSING_ERRNOS or time.monotonic() >= deadline:
                raise
            if is_silent:
                text = f"checkpoint agent: {root} cannot be written ({error.strerror}); trying again"
                print(f"{text} for {patience_s:.0f} s", file=sys.stderr, flush=True)
            is_silent = False
            wait(_RETRY_S)


def _hold_lock(fd: int) -> None:
    with contextlib.suppress(OSError):
        locking.wait_for_lock(fd)
