"""How long a benchmark waits for a training, with a run that exists only in the test."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.journals import event
from library.training_run import NeverStarted, TrainingRun

from checkpointing.agent.events import Log
from runner.journal.journal import JOURNAL_NAME, Journal

pytestmark = pytest.mark.fast


class Subject(TrainingRun):
    """A run whose process exists only in the test."""

    process: Any

    def __init__(self, folder: Path) -> None:
        super().__init__(["runner", "start"], folder)
        self.code: int | None = None
        self.process = SimpleNamespace(poll=lambda: self.code)
        self._written = Journal(folder / JOURNAL_NAME, time.time)

    def log(self, step: int, attempt: int = 1) -> None:
        self._written.append(event("log", step=step, loss=1.0), attempt)


@pytest.fixture
def run(tmp_path: Path) -> Subject:
    return Subject(tmp_path)


def test_the_first_entry_from_a_step_on(run: Subject) -> None:
    for step, attempt in ((3, 1), (7, 1), (5, 2)):
        run.log(step, attempt)
    entry = run.wait_for_step(5)
    assert isinstance(entry.event, Log) and (entry.event.step, entry.attempt) == (7, 1)
    assert run.wait_for_step(5, after=1).attempt == 2


def test_a_run_that_does_not_get_there_shows_its_output(run: Subject, tmp_path: Path) -> None:
    (tmp_path / "output.log").write_text("Traceback: no data")
    run.code = 1
    with pytest.raises(NeverStarted, match="runner start did not reach step 5; the end of its output:\nTraceback"):
        run.wait_for_step(5)
    assert run.tail(4) == "data"
