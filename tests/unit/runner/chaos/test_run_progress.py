"""What a journal says about a run under test."""

from __future__ import annotations

from typing import Any

import pytest

from runner.chaos import run_progress
from runner.journal.events import Entry, parse
from runner.recovery.kinds import FailureKind


def event(name: str, attempt: int = 1, **rest: Any) -> Entry:
    entry = parse({"time": 1.0, "event": name, "attempt": attempt, **rest})
    assert entry is not None and entry.event.name == name, entry
    return entry


def test_an_empty_journal() -> None:
    assert run_progress.latest_step([]) == run_progress.latest_attempt([]) == run_progress.num_restarts([]) == 0
    assert not run_progress.is_halved([]) and not run_progress.has_progressed([], 0, None)
    assert run_progress.num_sessions_in_journal([], 2, pid=1) == 2


def test_steps_attempts_restarts_and_saves_are_counted() -> None:
    events = [
        event("log", loss=1.0, step=3),
        event("snapshot", step=4, to_be_committed=True),
        event("snapshot", step=5, to_be_committed=False),
        event("backoff", delay_s=1.0),
        event("training_started", 2, step=4),
        event("committed", 2, step=4),
    ]
    assert run_progress.latest_step(events) == 5
    assert run_progress.latest_attempt(events) == 2
    assert run_progress.num_restarts(events) == 1
    assert run_progress.num_saves_begun(events) == 1


def test_only_running_out_of_memory_halves_the_micro_batch() -> None:
    assert run_progress.is_halved(
        [event("attempt_ended", cause="x", step=1, start_step=0, kind=FailureKind.OUT_OF_MEMORY.value)]
    )
    assert not run_progress.is_halved(
        [event("attempt_ended", cause="x", step=1, start_step=0, kind=FailureKind.CRASHED.value)]
    )


def test_an_attempt_that_continues_shows_a_step_after_the_fault() -> None:
    events = [event("training_started", step=0), event("log", loss=1.0, step=1)]
    assert not run_progress.has_progressed(events, 2, 1)
    assert run_progress.has_progressed([*events, event("log", loss=1.0, step=2)], 2, 1)


@pytest.mark.parametrize(
    ("newer", "expected"),
    [
        # The old attempt logged once more before it ended.
        ([event("log", 1, loss=1.0, step=2), event("backoff", 1, delay_s=1.0)], False),
        # The new attempt began, but made no step yet.
        (
            [event("log", 1, loss=1.0, step=2), event("backoff", 1, delay_s=1.0), event("training_started", 2, step=0)],
            False,
        ),
        (
            [event("backoff", 1, delay_s=1.0), event("training_started", 2, step=0), event("log", 2, loss=1.0, step=1)],
            True,
        ),
    ],
)
def test_a_new_attempt_must_begin_and_make_a_step(newer: list[Entry], expected: bool) -> None:
    before = [event("training_started", step=0), event("log", loss=1.0, step=1)]
    assert run_progress.has_progressed([*before, *newer], 2, None) is expected


def test_a_session_that_finds_the_run_finished_writes_nothing() -> None:
    events = [event("run_started", pid=7), event("run_ended", exit_code=0, state="finished")]
    assert run_progress.num_sessions_in_journal(events, 2, pid=8) == 1
    assert run_progress.num_sessions_in_journal(events, 1, pid=7) == 1
    assert run_progress.has_session(events, 7) and not run_progress.has_session(events, 8)
