"""What the runner asks of the operating system, in one object that unit tests replace."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from checkpointing.memory import oom_kills
from runner.system import processes


class Host:
    """The operating system of this node."""

    def __init__(self) -> None:
        """Note what runs below this process before the run begins."""
        self._others = {(process.pid, processes.start_ticks(process.pid)) for process in processes.descendants()}

    def monotonic(self) -> float:
        """Return the seconds of a clock that is never set."""
        return time.monotonic()

    def oom_kills(self) -> int:
        """Return how many processes the kernel killed because memory ran out, in this container or on this node."""
        return oom_kills()

    def process_state(self, pid: int) -> str:
        """Return the state of a process as one letter of ps(1); ? if it does not exist."""
        return processes.state(pid)

    def descendants(self) -> list[psutil.Process]:
        """Return the running descendants of this process that belong to a run."""
        return processes.descendants_of_runs(self._others)

    def kill_all(self, find: Callable[[], list[psutil.Process]], timeout_s: float = 10.0) -> int:
        """Send SIGKILL to what `find` returns until it returns nothing; return how many processes were killed."""
        return processes.kill_all(find, timeout_s)

    def reap_strays(self, managed: set[int]) -> None:
        """Reap adopted children that have exited, except the process ids in `managed`."""
        processes.reap_strays(managed)
