"""What the runner asks of the operating system, in one object: a unit test passes its own and needs no process."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from checkpointing.memory import oom_kills
from runner.system import processes


class Host:
    """The machine that this process runs on."""

    def monotonic(self) -> float:
        """Seconds of a clock that nobody sets."""
        return time.monotonic()

    def oom_kills(self) -> int:
        """Processes that the kernel has killed for memory, in this container or on this machine."""
        return oom_kills()

    def process_state(self, pid: int) -> str:
        """One letter, as in ps(1); a question mark where there is no such process."""
        return processes.state(pid)

    def descendants(self) -> list[psutil.Process]:
        """All living processes below this one."""
        return processes.descendants()

    def kill_all(self, find: Callable[[], list[psutil.Process]], timeout_s: float = 10.0) -> int:
        """SIGKILL everything that `find` returns until it returns nothing; returns how many were killed."""
        return processes.kill_all(find, timeout_s)

    def reap_strays(self, managed: set[int]) -> None:
        """Collect adopted children that have ended; `managed` pids are left to whoever started them."""
        processes.reap_strays(managed)
