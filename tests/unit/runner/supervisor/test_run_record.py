"""What is kept with the checkpoints for the next runner: by whom it is written, and when not."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from helpers.journals import event
from helpers.node_fakes import FakeNode, FakeSession

from checkpointing.agent.events import FencedEvent
from checkpointing.host.watched_directory import WatchedDirectory
from checkpointing.storage import LocalStorage, open_storage
from checkpointing.storage.object_store import StorageTimeout
from checkpointing.storage.sidecars import LocalSidecars
from runner.errors import CheckpointsMissing, ExitCode, RunnerError, UsageError
from runner.journal.attempts import Job
from runner.journal.journal import Journal
from runner.program.program import Program
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.recovery.restart_state import RestartState, RunnerProcess
from runner.session.admission import Limits
from runner.session.identity import JobIdentity, key_of
from runner.supervisor.run_record import RunRecord, end_of_error, end_without_location

JOB = JobIdentity({"job": "script train.py"})


class Bench:
    def __init__(self, folder: Path, *, identity: JobIdentity | None = JOB, before: RestartState | None = None) -> None:
        self.session = FakeSession(folder)
        self.storage = self.session.config.tiers.durable
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        self.session.directory.create()
        if before is not None:
            self.storage.sidecars.write_restart_state(before.to_json(0).encode())
        self.record = RunRecord(self.session.config, self.session.directory, "run", identity)
        self.node: Any = FakeNode(display=self.session.display, record=self.session.record)

    @property
    def stored(self) -> RestartState:
        return RestartState.from_json(self.storage.sidecars.read_restart_state())


def failure(kind: FailureKind = FailureKind.CRASHED) -> Failure:
    return Failure(kind, "why", 0, 5)


def test_the_first_session_gives_the_run_its_lineage(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.record.state.lineage == "run"
    assert bench.record.state.runner == RunnerProcess.current()
    assert Bench(tmp_path, before=RestartState(lineage="first")).record.state.lineage == "first"


def test_failures_are_kept_until_the_run_has_finished(tmp_path: Path) -> None:
    record = Bench(tmp_path).record
    record.state.running = 1
    record.add(failure(), 3)
    record.add(failure(FailureKind.PREEMPTED), 3)
    assert [one.failure.kind for one in record.state.history] == [FailureKind.CRASHED] and record.state.running is None
    record.add(failure(FailureKind.FINISHED), 5)
    assert record.state.history == []


def test_the_agent_writes_the_state_or_without_one_this_process(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.record.state.reached = 7
    bench.record.keep(bench.node, 1)
    assert len(bench.node.notes) == 1 and bench.stored == RestartState()
    bench.node.has_agent = False
    bench.record.keep(bench.node, 1)
    assert bench.stored.reached == 7


def test_a_fenced_runner_writes_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.node.has_agent = False
    bench.node.checkpoints.handle(FencedEvent(reason="attempt 9 has begun elsewhere"))
    bench.record.keep(bench.node, 1)
    assert not bench.node.notes and bench.storage.sidecars.read_restart_state() is None


@pytest.mark.parametrize("identity", [JOB, None])
def test_a_finished_job_is_recorded_by_its_key(tmp_path: Path, identity: JobIdentity | None) -> None:
    bench = Bench(tmp_path, identity=identity)
    bench.record.keep_finished(3)
    assert bench.stored.finished == (key_of(JOB) if identity is not None else "")
    assert bench.record.has_finished is (identity is not None)
    other = RunRecord(bench.session.config, bench.session.directory, "run", JobIdentity({"job": "script other.py"}))
    assert not other.has_finished


def test_a_state_that_storage_refuses_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("read-only")

    bench = Bench(tmp_path)
    bench.node.has_agent = False
    monkeypatch.setattr(LocalSidecars, "replace_restart_state", refuse)
    bench.record.keep(bench.node, 1)
    monkeypatch.setattr(LocalStorage, "steps", refuse)
    assert not bench.record.is_durable(5), "what cannot be found out is not taken for durable"


def test_the_next_attempt_continues_the_state(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    state = bench.record.state
    state.skipped, state.lost_steps, state.reached = [(5, 9), (12, 12)], 4, 40
    bench.session.attempt = 3
    job = Job(Program("script", "train.py"), resume_from="/from", allow_changes=True)
    limits = Limits(1, 4, local_ranks=2)
    spec = bench.record.next_spec(bench.session, {0, 1}, job, limits)
    assert (spec.attempt, spec.nnodes, spec.skipped, spec.lineage) == (3, 2, "5-9,12-12", "run")
    assert (spec.lost_steps, spec.reached, spec.resume_from, spec.allow_changes) == (4, 40, "/from", True)
    assert (spec.max_nodes, spec.planned_ranks, spec.failure_history) == (4, 8, "0:0")
    # Where the number of nodes is fixed, batch and learning rate follow what the user starts.
    assert bench.record.next_spec(bench.session, {0, 1}, job, Limits(2, 2, local_ranks=2)).planned_ranks == 0


def test_the_history_counts_failures_and_the_time_with_a_runner(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    now = bench.session.clock()
    times = iter([now - 100, now - 90, now - 50, now - 40, now - 10])
    journal = Journal(bench.session.directory.journal, lambda: next(times))
    journal.append(event("run_started", run_id="run"), 0)
    journal.append(event("attempt_started", nnodes=1), 1)
    ended = {"kind": "crashed", "cause": "why", "rank": 0, "step": 5, "start_step": 0, "training_began": 0.0}
    journal.append(event("attempt_ended", **ended, last_step_at=0.0, failed_at=0.0, committed_step=-1), 1)
    journal.append(event("run_ended", state="failed", exit_code=76, reason="why"), 1)
    journal.append(event("run_started", run_id="run"), 1)
    failures, _, seconds = bench.record.next_spec(bench.session, {0}, Job(), Limits(1, 1)).failure_history.partition(
        ":"
    )
    assert failures == "1" and float(seconds) == pytest.approx(70, abs=2)


def test_the_event_that_begins_a_session(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    started = bench.record.started(bench.session, 7, "place")
    assert (started.run_id, started.committed_step, started.place) == ("run", 7, "place")
    assert RunnerProcess.from_dict(started.runner) == RunnerProcess.current()


@pytest.mark.parametrize("outside", [True, False])
def test_the_journal_is_copied_if_the_checkpoints_are_elsewhere(tmp_path: Path, outside: bool) -> None:
    bench = Bench(tmp_path / "run")
    if outside:
        bench.session.config.checkpoint.location = str(tmp_path / "elsewhere")
    record = RunRecord(bench.session.config, bench.session.directory, "run", JOB)
    bench.session.directory.journal.write_text('{"time": 1, "event": "run_started", "attempt": 0}\n')
    copied: list[str] = []

    def keep_file(name: str, path: Path, start: int, end: int) -> bool:
        copied.append(name)
        return True

    bench.node.keep_file = keep_file
    record.copy_journal(bench.node, 1000.0)
    record.flush_journal(bench.node)
    record.finish_journal()
    assert copied == (["journal-run-run.000000.jsonl"] if outside else [])
    if outside:
        assert [*bench.session.config.tiers.durable.sidecars.sizes("journal-")] == copied


def test_a_start_while_the_durable_tier_is_away_goes_by_the_local_tiers_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, local = Bench(tmp_path), tmp_path / "nvme"
    bench.session.config.checkpoint.local_tier = str(local)
    record = RunRecord(bench.session.config, bench.session.directory, "run", JOB)
    record.state.reached = 7
    # Nobody has committed there yet.
    record.keep(bench.node, 1)
    assert not local.exists()
    local.mkdir()
    record.keep(bench.node, 1)

    def away(self: LocalSidecars) -> bytes | None:
        if self._folder.parent != local:
            raise StorageTimeout("no answer")
        return (local / ".runner.json").read_bytes()

    monkeypatch.setattr(LocalSidecars, "read_restart_state", away)
    again = RunRecord(bench.session.config, bench.session.directory, "run", JOB, is_away=True)
    assert again.state.reached == 7
    with pytest.raises(StorageTimeout):
        RunRecord(bench.session.config, bench.session.directory, "run", JOB)


@pytest.mark.parametrize(
    ("error", "exit_code", "reason"),
    [
        (UsageError("use --nnodes"), ExitCode.USAGE, "use --nnodes"),
        (CheckpointsMissing("holds no checkpoint"), CheckpointsMissing.exit_code, "holds no checkpoint"),
        # A full disk may have room again, or another node may have some: not the error of this run.
        (
            OSError(errno.ENOSPC, "No space left", "/run/x"),
            ExitCode.BUDGET_SPENT,
            "system error: /run/x: No space left",
        ),
        (OSError("odd"), ExitCode.BUDGET_SPENT, "system error: odd"),
    ],
)
def test_errors_outside_of_attempts(error: RunnerError | OSError, exit_code: ExitCode, reason: str) -> None:
    end = end_of_error(error)
    assert (end.exit_code, end.reason) == (exit_code, reason)


def test_a_location_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "checkpoints"))
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    assert end_without_location(storage, 3) is None
    (tmp_path / "checkpoints").rename(tmp_path / "moved")
    end = end_without_location(storage, 3)
    assert end is not None and end.exit_code is ExitCode.STORAGE_FAILED
    assert "existed when attempt 3 began and is gone; put it back" in end.reason


def test_a_location_that_was_removed_does_not_end_the_run(tmp_path: Path) -> None:
    """Nobody can put it back, and what ranks have in memory was dropped."""
    storage, root = open_storage(str(tmp_path / "checkpoints")), tmp_path / "checkpoints"
    root.mkdir()
    watched = WatchedDirectory(root)
    root.rename(tmp_path / "moved")
    assert end_without_location(storage, 3, watched) is not None
    (tmp_path / "moved").rmdir()
    assert end_without_location(storage, 3, watched) is None


def test_object_storage_is_never_gone() -> None:
    assert end_without_location(open_storage("memory://bucket/run"), 3) is None


def test_a_location_that_does_not_answer_now_is_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stale handle a run ended at its first restart, though the handle was good again after seconds."""
    storage = open_storage(str(tmp_path / "checkpoints"))

    def stale(self: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle", str(self))

    monkeypatch.setattr(Path, "is_dir", stale)
    assert end_without_location(storage, 3) is None
