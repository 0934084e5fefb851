"""What `async_save` copies at once, what later, and what becomes of a state that changes meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_dcp import commit_and_verify, dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from checkpointing.dcp import staging
from checkpointing.dcp.seam import STAGING
from checkpointing.dcp.staging import Staging
from checkpointing.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


class Training:
    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        torch.manual_seed(0)
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step()

    def step(self) -> None:
        self.model(torch.randn(4, 8)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": 1}

    def digest(self, state: dict[str, Any]) -> list[float]:
        moments = [value for one in state["optimizer"]["state"].values() for value in one.values()]
        return [float(value.double().sum()) for value in (*state["model"].values(), *moments)]


@pytest.fixture
def training() -> Iterator[Training]:
    staging = Staging()
    yield Training(staging)
    staging.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds copies of the copy thread until it is set."""
    gate = threading.Event()
    call = staging._Work.__call__

    def waits(self: Any, copy: Any) -> None:
        assert gate.wait(30)
        call(self, copy)

    monkeypatch.setattr(staging._Work, "__call__", waits)
    return gate


def test_a_step_of_an_optimizer_waits_for_the_copy_which_has_the_state_before_it(
    training: Training, held: threading.Event
) -> None:
    before = training.digest(training.state())
    staged = training.staging.stage(training.state())
    waiting = threading.Thread(target=training.step)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and not training.staging.when_copied(staged).done()
    held.set()
    waiting.join(30)
    assert training.staging.when_copied(staged).result(30) is staged
    found = training.digest(staged)
    # Running statistics change in the forward pass: they are copied at once.
    assert found == before != training.digest(training.state())


def test_what_changes_without_an_optimizer_fails_the_save_and_later_ones_are_copied_at_once(
    training: Training, held: threading.Event
) -> None:
    staged = training.staging.stage(training.state())
    with torch.no_grad():
        training.model[0].weight.add_(1)
    held.set()
    with pytest.raises(CheckpointError, match=r"training has changed .* before it was copied, without an optimizer"):
        training.staging.when_copied(staged).result(30)
    training.staging.saved(staged)
    again = training.staging.stage(training.state())
    assert training.staging.when_copied(again).done()
    assert training.digest(again) == training.digest(training.state())


def test_a_write_that_torch_does_not_count_is_found_in_the_samples(training: Training, held: threading.Event) -> None:
    staged = training.staging.stage(training.state())
    training.model[0].weight.data.numpy()[:] += 1
    held.set()
    with pytest.raises(CheckpointError, match="parameter 0 of optimizer 0"):
        training.staging.when_copied(staged).result(30)


def test_memory_is_used_again_once_it_was_saved_and_not_before(training: Training) -> None:
    first = training.staging.stage(training.state())
    training.staging.when_copied(first).result(30)
    second = training.staging.stage(training.state())
    places = [one["model"]["0.weight"].data_ptr() for one in (first, second)]
    training.staging.saved(first)
    third = training.staging.stage(training.state())
    assert places[0] != places[1] and third["model"]["0.weight"].data_ptr() == places[0]
    assert training.staging.when_copied("another stager's") == "another stager's"


def test_what_no_optimizer_holds_is_copied_at_once() -> None:
    staging = Staging()
    tensor = torch.ones(4)
    staged = staging.stage({"own": tensor, "n": 3, "t": (1, None)})
    tensor.zero_()
    assert staging.when_copied(staged).done() and staged["own"].sum() == 4 and staged["t"] == (1, None)
    staging.close()


def test_async_save_commits_what_was_there_when_it_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: Training
) -> None:
    reports = commit_and_verify(monkeypatch)
    training.step()
    for number, options in enumerate(({}, {"storage_writer": dcp.FileSystemWriter(tmp_path / "step-1")})):
        place = tmp_path / f"step-{number}"
        before = training.digest(training.state())
        arguments = options or {"checkpoint_id": str(place)}
        saved = dcp.async_save(training.state(), **arguments)
        training.step()
        saved.result(30)
        into = training.state()
        dcp.load(into, checkpoint_id=str(place))
        assert training.digest(into) == before
    assert [one.name for one in reports] == ["committed", "resumed"] * 2


def test_a_process_of_its_own_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = commit_and_verify(monkeypatch)
    stager = DefaultStager(StagingOptions(False, False, True, False))
    kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
    found = dcp.async_save(
        {"a": torch.ones(3)}, checkpoint_id=str(tmp_path / "step-4"), async_stager=stager, async_checkpointer_type=kind
    )
    found.staging_completion.result(30)
    found.upload_completion.result(30)
    stager.close()
    assert [one.name for one in reports] == ["committed"]


def test_the_table_of_what_the_copy_uses_is_what_is_there() -> None:
    assert [name.problem() for name in STAGING if name.problem()] == []


def test_a_stager_that_a_program_calls_itself_returns_a_complete_copy(
    monkeypatch: pytest.MonkeyPatch, held: threading.Event, tmp_path: Path
) -> None:
    """Only `async_save` waits for a copy before it reads it."""
    commit_and_verify(monkeypatch)
    executor: Any = dcp.state_dict_saver._ThreadBasedAsyncCheckpointExecutor
    training = Training(executor.args[0])
    for stager in (DefaultStager(StagingOptions(False, False, False, False)), dcp.FileSystemWriter(tmp_path)):
        staged: Any = stager.stage(training.state())
        assert training.digest(staged) == training.digest(training.state())
    held.set()
