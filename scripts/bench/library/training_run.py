"""A training that a benchmark starts under `runner start`, or under what else restarts it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from checkpointing.agent.events import Event, Log
from checkpointing.host.threads import is_readable
from runner.chaos.run_under_test import RunUnderTest, runner_command
from runner.journal.events import Entry

# From the start to the first steps: mostly imports, on a machine that may be busy.
START_TIMEOUT_S = 240.0


class NeverStarted(SystemExit):
    """The run did not reach a step in time. Ends the program unless it is caught."""


class TrainingRun(RunUnderTest):
    """A run under test, with the entries of its journal by event class."""

    def __enter__(self) -> TrainingRun:
        super().__enter__()
        return self

    def journal(self) -> list[Entry]:
        """Return the journal's entries so far."""
        self.refresh()
        return self.entries

    def find(self, *kinds: type[Event], after: int | None = None) -> list[Entry]:
        """Return the entries of some event classes; with `after`, of later attempts than that."""
        return [e for e in self.journal() if isinstance(e.event, kinds) and (after is None or e.attempt > after)]

    def steps(self, *, after: int | None = None) -> list[tuple[Entry, int]]:
        """Return the entries of finished steps, each with its step; `after` as for `find`."""
        return [(e, e.event.step) for e in self.find(Log, after=after) if isinstance(e.event, Log)]

    def wait_for_step(self, step: int, *, after: int | None = None) -> Entry:
        """Wait for the first logged step from this one on, in a later attempt than `after`, and return its entry.

        Raises:
            NeverStarted: The run did not get there in time, or ended.
        """
        entry = self.wait(lambda: self._log_entry(step, after), START_TIMEOUT_S)
        if entry is None:
            raise NeverStarted(
                f"{' '.join(self.command)} did not reach step {step}; the end of its output:\n{self.tail(3000)}"
            )
        return entry

    def _log_entry(self, step: int, after: int | None) -> Entry | None:
        for entry in self.entries:
            if isinstance(entry.event, Log) and entry.event.step >= step and (after is None or entry.attempt > after):
                return entry
        return None

    def stop(self, timeout_s: float) -> tuple[int | None, float]:
        """Send SIGTERM.

        Returns:
            The exit code (None if it did not exit in time), and the seconds it took.
        """
        pidfd = os.pidfd_open(self.process.pid)
        try:
            began = time.perf_counter()
            self.process.send_signal(signal.SIGTERM)
            is_readable(pidfd, timeout_s)
            seconds = time.perf_counter() - began
        finally:
            os.close(pidfd)
        # The supervisor is reaped here: it is this process's own child, so `reap_strays` must not do it.
        code = self.process.poll()
        self.refresh()
        return code, seconds


def start_command(folder: Path, *options: str, settings: Sequence[str] = (), script: Sequence[str] = ()) -> list[str]:
    """Return the command `runner start` with options, settings and perhaps a script."""
    set_options = [part for setting in settings for part in ("--set", setting)]
    return runner_command(folder, *options, *set_options, script=script)
