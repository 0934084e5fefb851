"""What a training commits, and how it ends: for a single rank, with an agent in this process."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_checkpoint import network, write_checkpoint
from torch.utils.data import DataLoader, TensorDataset
from unit.checkpointing.doubles import Connection, manager, options

from checkpointing.errors import CommitFailed, Preempted
from checkpointing.format.layout import MODEL_NAME
from checkpointing.host.environment import RankSettings
from checkpointing.host.heartbeat import Phase
from checkpointing.manager import rank_signals
from checkpointing.snapshot.cadence import Cadence


class Job:
    """A training that has begun at a step."""

    def __init__(self, folder: Path, start_step: int = 0, cadence: Cadence | None = None, **settings: Any) -> None:
        self.connection = Connection(folder)
        self.client = self.connection.client
        own = options(folder, RankSettings(**settings), cadence)
        self.training = manager(own, self.connection)
        self.model, self.optimizer = network()
        self.training.track(model=self.model, optimizer=self.optimizer)
        self.training.begin(start_step, 100)

    def loop_step(self, step: int, **metrics: float) -> None:
        """End a step of a loop that saves nothing itself."""
        self.training.end_of_step(step)
        self.training._saving.last.ended(step, step, metrics)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.client.events if event["event"] == name]


@pytest.fixture(autouse=True)
def no_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has read no signal yet, and leaves none behind."""
    monkeypatch.setattr(rank_signals, "_num_readers", 1)
    monkeypatch.setattr(rank_signals, "_requested", False)
    yield


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_the_begin_is_reported_and_what_was_restored_is_not_saved_again(tmp_path: Path) -> None:
    job = Job(tmp_path, start_step=7)
    [started] = job.events("training_started")
    assert (started["step"], started["total_steps"]) == (7, 100)
    assert job.client.beat.phase is Phase.TRAINING and job.client.beat.start_step == 7
    assert not job.training.wants(7) and job.training.wants(8)
    job.training.save(7, 7)
    job.training.close()
    assert job.client.staged_steps == {}


def test_a_step_is_saved_once_with_its_small_files(job: Job) -> None:
    for _ in range(2):
        job.training.save(3, 12, {"own.json": b"own"}, {"shared.json": lambda: b"shared"})
    job.training.wait_for_commit()
    files = job.client.staged_steps[3]
    assert (files["own.json"], files["shared.json"]) == (b"own", b"shared")
    assert MODEL_NAME in files and "rng_state.pth" in files
    assert job.client.commits == [3] and job.client.beat.phase is Phase.TRAINING


def test_a_step_that_is_in_memory_can_still_be_committed(job: Job) -> None:
    """A snapshot may be due at the last step of an epoch, at whose end the script saves."""
    job.training.save(3, 12, commit=False)
    assert job.training.wants(3) and not job.training.wants(3, commit=False)
    job.training.save(3, 12, metrics={"loss": 0.5})
    assert not job.training.wants(3)
    job.training.save(3, 12, commit=False)
    job.training.wait_for_commit()
    assert job.client.commits == [3]


def test_only_finite_metrics_decide_which_checkpoint_is_best(job: Job) -> None:
    values: dict[str, Any] = {"loss": torch.tensor(0.5), "eval_loss": float("nan"), "norm": float("inf")}
    job.training.save(3, 12, metrics=values)
    job.training.wait_for_commit()
    assert job.client.metrics == {3: {"loss": 0.5}} and type(job.client.metrics[3]["loss"]) is float


def test_a_snapshot_in_memory_is_not_waited_for(job: Job) -> None:
    job.client.errors[3] = "disk full"
    job.training.save(3, 12, commit=False)
    job.training.wait_for_commit()
    assert list(job.client.staged_steps) == [3] and job.client.commits == []


def test_a_commit_that_storage_refuses_ends_the_wait_with_its_reason(job: Job) -> None:
    job.client.errors[3] = "disk full"
    job.training.save(3, 12)
    with pytest.raises(CommitFailed, match="disk full"):
        job.training.wait_for_commit()


def test_no_step_runs_while_a_commit_is_waited_for(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a large state takes longer than the limit of a short step. Here the last step was not due."""
    phases = []
    monkeypatch.setattr(job.client, "wait", lambda step: phases.append((step, job.client.beat.phase)))
    job.training.save(3, 12)
    job.training.wait_for_commit()
    assert job.client.beat.phase is Phase.TRAINING
    job.loop_step(4)
    job.training.close()
    assert phases == [(3, Phase.SAVING), (4, Phase.SAVING)] and job.client.commits == [3, 4]


def test_no_step_runs_while_the_best_model_is_read(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    phases = []
    monkeypatch.setattr(job.training._node.restorer, "load_best", lambda *_, **__: phases.append(job.client.beat.phase))
    job.training.load_best(3)
    assert phases == [Phase.IDLE] and job.client.beat.phase is Phase.TRAINING


def test_after_the_last_step_no_step_runs(job: Job) -> None:
    phases = []
    for step in (99, 100):
        job.training.end_of_step(step)
        phases.append(job.client.beat.phase)
    assert phases == [Phase.TRAINING, Phase.IDLE]


def test_a_request_to_stop_is_agreed_on_at_the_next_step(job: Job) -> None:
    assert not job.training.end_of_step(1).stop
    job.client.control.stop_requested = True
    assert job.training.stop_wanted
    job.training._protocol.drain()
    found = [job.training.agree_to_stop() for _ in range(2)]
    assert found == [False, True]


def test_stopping_commits_and_is_no_end_of_the_training(job: Job) -> None:
    job.training.finished = True
    job.training.save(3, 12)
    with pytest.raises(Preempted):
        job.training.stop(3)
    assert job.client.commits == [3] and job.connection.left == [(3, False)]


@pytest.mark.parametrize("finished", [True, False])
def test_closing_twice_leaves_the_agent_once(finished: bool, job: Job) -> None:
    job.training.finished = finished
    job.training.end_of_step(5)
    for _ in range(2):
        job.training.close()
    assert job.training.is_closed and job.client.beat.phase is Phase.DONE
    assert job.connection.left == [(5, finished)] and job.connection.num_closed == 1


def test_a_manager_that_was_never_used_reaches_no_agent(tmp_path: Path) -> None:
    connection = Connection(tmp_path)
    manager(options(tmp_path), connection).close()
    assert connection.num_connected == 0


def test_the_last_step_of_a_loop_is_committed_at_its_end(job: Job) -> None:
    for step in (1, 2):
        job.loop_step(step, loss=0.5)
    job.training.close()
    assert job.client.commits == [2] and job.client.metrics == {2: {"loss": 0.5}}


def test_a_last_step_that_is_in_memory_only_is_committed_too(job: Job) -> None:
    job.loop_step(2)
    job.training.save(2, 2, commit=False)
    job.training.close()
    assert job.client.commits == [2]


def test_a_loop_that_made_no_step_after_its_restore_commits_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, start_step=7)
    job.loop_step(7)
    job.training.close()
    assert job.client.commits == []


def test_a_loop_that_resumed_from_shares_and_made_no_step_ends_when_they_are_committed(tmp_path: Path) -> None:
    """Nobody commits them again; the next attempt then computes the last steps once more."""
    job = Job(tmp_path, start_step=7)
    job.training.restoring._started_in_shares = True
    with pytest.raises(CommitFailed, match="could not commit the shares of step 7"):
        job.training.close()
    assert job.client.waited == [True] and job.client.discarded == [7]
    write_checkpoint(tmp_path, 7, network())
    job = Job(tmp_path, start_step=7)
    job.training.restoring._started_in_shares = True
    job.training.close()
    # Once there was a step, its own save counts.
    job = Job(tmp_path, start_step=5)
    job.training.restoring._started_in_shares = True
    job.loop_step(6)
    job.training.close()
    assert job.client.commits == [6] and job.client.waited == []


def test_an_exception_in_the_loop_commits_no_last_step(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.loop_step(2)
    try:
        raise RuntimeError("a bug of the script")
    except RuntimeError:
        job.training.close()
    assert job.client.commits == [] and "step 2 is not committed" in caplog.text


def test_a_failed_last_commit_closes_the_own_agent_all_the_same(job: Job) -> None:
    job.client.errors[2] = "disk full"
    job.loop_step(2)
    with pytest.raises(CommitFailed, match="disk full"):
        job.training.close()
    assert job.connection.num_closed == 1 and job.connection.left == []


@pytest.mark.parametrize(("location", "finished"), [("", False), ("here", True)])
def test_under_a_supervisor_the_end_of_a_loop_ends_its_stage(location: str, finished: bool, tmp_path: Path) -> None:
    job = Job(tmp_path, location=str(tmp_path / location) if location else "")
    job.loop_step(2)
    job.training.close()
    assert job.connection.left == [(2, finished)]


def test_what_is_due_by_steps_is_due(tmp_path: Path) -> None:
    job = Job(tmp_path, cadence=Cadence(save_steps=2))
    assert [job.training.end_of_step(step).save for step in (1, 2, 3)] == [False, True, False]


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_step_saves_the_position_behind_what_it_has_used(ahead: int, tmp_path: Path) -> None:
    """Also the last one, which `close` saves after the loop has drawn once more."""
    job = Job(tmp_path, cadence=Cadence(snapshot_steps=None, save_steps=2))
    batches = job.training._positions.batches(DataLoader(TensorDataset(torch.arange(9))), ahead)
    for _ in range(ahead):
        next(batches)
    for step in (1, 2, 3):
        next(batches)
        job.training.step(step)
    next(batches)
    job.training.close()
    assert job.client.commits == [2, 3]
    for step in (2, 3):
        (position,) = torch.load(io.BytesIO(job.client.staged_steps[step]["data_state.pth"]), weights_only=True)
        assert position["consumed"] == step


def test_a_pause_is_a_sign_of_life_until_the_next_step_begins(job: Job) -> None:
    job.training.end_of_step(4)
    job.training.pause()
    beat = job.client.beat
    assert (beat.phase, beat.step) == (Phase.IDLE, 4)
    job.training.pause()
    assert job.client.beat.beats == beat.beats + 1
    for _ in range(2):
        job.training.begin_step()
    assert job.client.beat.phase is Phase.TRAINING and job.client.beat.beats == beat.beats + 2
