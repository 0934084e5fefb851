"""A training that a benchmark starts, with its journal's typed entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from checkpointing.events import Event, Log
from runner.chaos.run_under_test import START_TIMEOUT_S, NeverStarted, Subject
from runner.journal.events import Entry
from runner.journal.journal import JOURNAL_NAME, JournalReader


class TrainingRun(Subject):
    """A run under test whose journal is read by event class."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        super().__init__(command, folder, environment)
        self._entries = JournalReader(folder / JOURNAL_NAME)

    def __enter__(self) -> TrainingRun:
        super().__enter__()
        return self

    def entries(self) -> list[Entry]:
        """Return the journal's entries so far."""
        return self._entries.entries()

    def find(self, *kinds: type[Event], after: int | None = None) -> list[Entry]:
        """Return the entries of some event classes; with `after`, of later attempts than that."""
        return [e for e in self.entries() if isinstance(e.event, kinds) and (after is None or e.attempt > after)]

    def steps(self, *, after: int | None = None) -> list[tuple[Entry, int]]:
        """Return the entries of finished steps, each with its step; `after` as for `find`."""
        return [(e, e.event.step) for e in self.find(Log, after=after) if isinstance(e.event, Log)]

    def reach_step(self, step: int, *, after: int | None = None) -> Entry:
        """Wait for the first finished step from this one on.

        Raises:
            NeverStarted: The training did not reach it in time, or has ended.
        """

        def found() -> Entry | None:
            return next((entry for entry, number in self.steps(after=after) if number >= step), None)

        entry = self.wait(found, START_TIMEOUT_S)
        if entry is None:
            raise NeverStarted(f"{' '.join(self.command)} did not reach step {step}:\n{self.tail(3000)}")
        return entry
