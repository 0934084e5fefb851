"""What the runner asks of the operating system, in one object that unit tests replace."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil

from checkpointing.host.memory import oom_kills
from runner.system import processes

_OLD_S = 10.0


class Host:
    """The operating system of this node."""

    def __init__(self, *, adopts_strangers: bool | None = None) -> None:
        """Note what runs below this process before the run begins.

        Args:
            adopts_strangers: This process adopts what others than the run have started; None where it is a container's
                first one, or has other descendants already.
        """
        self._zombies: set[tuple[int, int]] = set()
        self._looked_at = self.monotonic()
        self._others = {(process.pid, processes.start_ticks(process.pid)) for process in processes.descendants()}
        # What the shell before `exec` had started may lose its parent, too.
        is_first = os.getpid() == 1 or bool(self._others)
        self._adopts_strangers = is_first if adopts_strangers is None else adopts_strangers

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
        return processes.descendants_of_runs(self._others, adopts_strangers=self._adopts_strangers)

    def kill_all(self, find: Callable[[], list[psutil.Process]], timeout_s: float = 10.0) -> int:
        """Send SIGKILL to what `find` returns until it returns nothing; return how many processes were killed."""
        return processes.kill_all(find, timeout_s)

    def reap_strays(self, managed: set[int]) -> None:
        """Reap adopted children that have exited, except the process ids in `managed`."""
        processes.reap_strays(managed)

    def reap_old(self, managed: set[int]) -> None:
        """Reap, every 10 s, the children that had exited 10 s ago, except the process ids in `managed`.

        What this process has started itself, it waits for earlier. A rank's orphans are its children, too, and there
        may be one for each step: a container has a limit of processes.
        """
        if self.monotonic() < self._looked_at + _OLD_S:
            return
        self._looked_at = self.monotonic()
        now = processes.zombies(managed)
        processes.reap(pid for pid, _ in now & self._zombies)
        self._zombies = now - self._zombies
