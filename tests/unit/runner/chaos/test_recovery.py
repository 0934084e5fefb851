"""What is expected of a run after a fault, with a run that only exists in the test."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from checkpointing.commit.tiers import open_tiers
from runner.chaos import recovery
from runner.chaos.recovery import RecoveryWatch, RunOver
from runner.chaos.scene import FailpointFile, JobPace, Moment, Scene
from runner.chaos.verdict import Injection
from runner.errors import ExitCode
from runner.journal.events import Entry, parse
from runner.recovery.kinds import FailureKind


class Process:
    """A supervisor that has exited with a code, or runs (None)."""

    pid = 7

    def __init__(self, code: int | None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code


class Run:
    """Answers as `RunUnderTest` does, without processes and without waiting."""

    def __init__(self, folder: Path, code: int | None, entries: list[Entry]) -> None:
        self.process, self.entries, self.num_starts = Process(code), entries, 0
        self.temporary = folder / "tmp"
        self.temporary.mkdir()

    def refresh(self) -> None:
        pass

    def wait(self, find: Any, timeout_s: Any) -> Any:
        return find()

    def leftovers(self, settle_s: float = 0.0) -> list[str]:
        return []

    def tail(self, length: int = 300) -> str:
        return "the end"

    def start(self) -> None:
        self.num_starts += 1


def scene_of(folder: Path, code: int | None, *lines: dict[str, Any]) -> tuple[Scene, Any]:
    entries = [entry for line in lines if (entry := parse({"time": 1.0, **line})) is not None]
    run: Any = Run(folder, code, entries)
    tiers = open_tiers(str(folder / "checkpoints"))
    return Scene(run, tiers, random.Random(1), FailpointFile(folder / "failpoints")), run


def watch(scene: Scene) -> RecoveryWatch:
    return RecoveryWatch(scene, [], lambda text: None)


def injection() -> Injection:
    return Injection("fault", "step", 1, 1, "done")


STARTED = {"event": "run_started", "attempt": 0, "pid": 7}


def ended(code: int) -> dict[str, Any]:
    return {"event": "run_ended", "attempt": 1, "exit_code": code, "state": "stopped"}


def test_a_preempted_runner_is_started_again(tmp_path: Path) -> None:
    scene, run = scene_of(tmp_path, ExitCode.PREEMPTED, STARTED, ended(75))
    observed, record = watch(scene), injection()
    observed.restart(record, Moment.STEP)
    assert record.violations == [] and run.num_starts == 1 and observed.sessions == 2


def test_a_killed_runners_temporary_files_are_no_leak(tmp_path: Path) -> None:
    scene, run = scene_of(tmp_path, -9)
    (run.temporary / "runner-x").mkdir()
    observed = watch(scene)
    observed.restart(injection(), Moment.START_UP)
    # It had not written to the journal, so the journal will lack this session.
    assert list(run.temporary.iterdir()) == [] and observed.sessions == 1


@pytest.mark.parametrize(("code", "text"), [(None, "did not exit"), (ExitCode.DETERMINISTIC, "exited with 78")])
def test_any_other_exit_is_a_violation(code: int | None, text: str, tmp_path: Path) -> None:
    scene, run = scene_of(tmp_path, code, STARTED)
    record = injection()
    with pytest.raises(RunOver):
        watch(scene).restart(record, Moment.STEP)
    assert text in record.violations[0] and run.num_starts == 0


def test_an_exit_code_that_contradicts_the_journal_is_a_violation(tmp_path: Path) -> None:
    scene, _ = scene_of(tmp_path, ExitCode.PREEMPTED, STARTED, ended(0))
    record = injection()
    watch(scene).restart(record, Moment.STEP)
    assert "its journal says 0" in record.violations[0]


def test_a_run_that_finished_costs_no_restart(tmp_path: Path) -> None:
    scene, _ = scene_of(tmp_path, ExitCode.DONE)
    observed = watch(scene)
    observed.min_restarts = observed.max_restarts = 1
    assert observed.noticed(1) and observed.min_restarts == 0


def test_a_fault_that_goes_unnoticed_is_reported(tmp_path: Path) -> None:
    scene, _ = scene_of(tmp_path, None)
    assert not watch(scene).noticed(1)


def test_a_run_without_a_new_step_has_not_recovered(tmp_path: Path) -> None:
    scene, _ = scene_of(tmp_path, None, {"event": "log", "attempt": 1, "step": 3, "loss": 1.0})
    record = injection()
    with pytest.raises(RunOver):
        watch(scene).recovered(record, 1, 1)
    assert record.violations == ["no recovery: no step within 120 s: the end"]
    watch(scene).recovered(injection(), 1, 0)


@pytest.mark.parametrize(("fault", "num_starts"), [("disk full", 1), ("rank killed", 0)])
def test_a_run_that_a_full_disk_ended_is_started_once_more(fault: str, num_starts: int, tmp_path: Path) -> None:
    scene, run = scene_of(tmp_path, ExitCode.STORAGE_FAILED)
    observed = RecoveryWatch(scene, [Injection(fault, "save", 1, 1, "full")], lambda text: None)
    finished, violations = observed.finish(JobPace(10, 0.01))
    assert not finished and run.num_starts == num_starts and "exited with 74" in violations[0]


def test_a_finished_run_needs_its_last_checkpoint(tmp_path: Path) -> None:
    scene, _ = scene_of(tmp_path, ExitCode.DONE, STARTED, ended(0))
    assert watch(scene).finish(JobPace(10, 0.01)) == (False, ["the run finished, but its newest checkpoint is []"])


def event(name: str, attempt: int = 1, **rest: Any) -> Entry:
    entry = parse({"time": 1.0, "event": name, "attempt": attempt, **rest})
    assert entry is not None and entry.event.name == name, entry
    return entry


def test_an_empty_journal() -> None:
    assert recovery.latest_step([]) == recovery.latest_attempt([]) == recovery.num_restarts([]) == 0
    assert not recovery.is_halved([]) and not recovery.has_progressed([], 0, None)
    assert recovery.num_sessions_in_journal([], 2, pid=1) == 2


def test_steps_attempts_restarts_and_saves_are_counted() -> None:
    events = [
        event("log", loss=1.0, step=3),
        event("snapshot", step=4, to_be_committed=True),
        event("snapshot", step=5, to_be_committed=False),
        event("backoff", delay_s=1.0),
        event("training_started", 2, step=4),
        event("committed", 2, step=4),
    ]
    assert recovery.latest_step(events) == 5
    assert recovery.latest_attempt(events) == 2
    assert recovery.num_restarts(events) == 1
    assert recovery.num_saves_begun(events) == 1


def test_only_running_out_of_memory_halves_the_micro_batch() -> None:
    assert recovery.is_halved(
        [event("attempt_ended", cause="x", step=1, start_step=0, kind=FailureKind.OUT_OF_MEMORY.value)]
    )
    assert not recovery.is_halved(
        [event("attempt_ended", cause="x", step=1, start_step=0, kind=FailureKind.CRASHED.value)]
    )


def test_an_attempt_that_continues_shows_a_step_after_the_fault() -> None:
    events = [event("training_started", step=0), event("log", loss=1.0, step=1)]
    assert not recovery.has_progressed(events, 2, 1)
    assert recovery.has_progressed([*events, event("log", loss=1.0, step=2)], 2, 1)


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
    assert recovery.has_progressed([*before, *newer], 2, None) is expected


def test_a_session_that_finds_the_run_finished_writes_nothing() -> None:
    events = [event("run_started", pid=7), event("run_ended", exit_code=0, state="finished")]
    assert recovery.num_sessions_in_journal(events, 2, pid=8) == 1
    assert recovery.num_sessions_in_journal(events, 1, pid=7) == 1
    assert recovery.has_session(events, 7) and not recovery.has_session(events, 8)
