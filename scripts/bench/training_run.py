"""A training that a benchmark starts, with the entries of its journal by event class."""

from __future__ import annotations

from checkpointing.agent.events import Event, Log
from runner.chaos.run_under_test import RunUnderTest
from runner.journal.events import Entry


class TrainingRun(RunUnderTest):
    """A run under test whose queries read the journal first."""

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
