"""The loop's own variables: from a trainer into a file, and from the file into another trainer."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.restore_points import point

from checkpointing.data.dealing import StepLayout
from checkpointing.data.stream import StreamPosition
from checkpointing.errors import InvalidCheckpoint
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.transformers.loop_state import JobRecord, LoopFigures, LoopState

LOOP = {"tr_loss": 0.25, "last_logged": 10, "metrics": {"entropy": [0.5, 1]}, "train_tokens": 1000}
RECORD = JobRecord(
    layout=StepLayout(2, 4, 1),
    job={"trainer": "Trainer", "training data": None},
    stream=StreamPosition(1, 2, 3, {"shard": 0}, 50, 7),
    ended=True,
    run_name="4f1c",
)


def trainer(**changes: Any) -> Any:
    fields = {
        "_tr_loss": torch.tensor(0.5),
        "_total_loss_scalar": 1.5,
        "_globalstep_last_logged": 10,
        "current_flos": 7.5e9,
        "_metrics": {"train": {"entropy": [0.5, 0.25]}},
        "_total_train_tokens": 1000,
    }
    return SimpleNamespace(**{**fields, **changes})


def blank() -> Any:
    return trainer(
        _tr_loss=torch.tensor(0.0),
        _total_loss_scalar=0.0,
        _globalstep_last_logged=20,
        current_flos=0,
        _metrics={"train": {}},
        _total_train_tokens=0,
    )


def read(document: dict[str, Any], rank: int = 0) -> LoopState:
    found = LoopState.read(point("loop_state_0.json", json.dumps(document).encode()), rank, 1)
    assert found is not None
    return found


@pytest.mark.parametrize("norm", [None, 1.25, torch.tensor(1.25)])
def test_everything_comes_back(norm: Any) -> None:
    figures = LoopFigures(norm, 0.01, 4)
    state = LoopState.capture(trainer(), figures, record=RECORD, evaluation_due=True, recent_losses=[2.5, 2.25])
    here = point("loop_state_0.json", state.to_bytes())
    assert JobRecord.read(here) == RECORD
    found = LoopState.read(here, 0, 1)
    assert found is not None and found.evaluation_due and found.recent_losses == [2.5, 2.25]
    other = blank()
    found.restore(other)
    assert other == trainer()
    assert found.figures == figures


def test_the_loss_is_that_of_the_moment_in_which_it_was_captured() -> None:
    source = trainer()
    state = LoopState.capture(source, LoopFigures())
    source._tr_loss += 1
    source._metrics["train"]["entropy"].append(9)
    document = json.loads(state.to_bytes())
    assert (document["tr_loss"], document["metrics"]) == (0.5, {"entropy": [0.5, 0.25]})


def test_a_trainer_without_trls_metrics_has_none() -> None:
    source = trainer()
    del source._metrics, source._total_train_tokens
    document = json.loads(LoopState.capture(source, LoopFigures()).to_bytes())
    assert not document.keys() & {"metrics", "train_tokens", "recent_losses", "stream", "tracked_as", "evaluation_due"}
    other = blank()
    read(document).restore(other)
    assert other._metrics == {"train": {}} and other._tr_loss == 0.5


def test_the_loop_continues_with_what_was_added_up() -> None:
    found = trainer(_metrics={"train": {"entropy": [], "x": [1]}})
    read(LOOP).restore(found)
    assert (found._tr_loss.item(), found._globalstep_last_logged, found._total_train_tokens) == (0.75, 10, 1000)
    assert found._metrics["train"] == {"entropy": [0.5, 1], "x": [1]}
    read({**LOOP, "tr_loss": float("nan")}).restore(found)
    assert torch.isnan(found._tr_loss)


def test_a_checkpoint_of_an_older_version_counts_its_loss_from_its_own_step() -> None:
    found = read({"tr_loss": 0.25, "last_logged": 10})
    assert (found.total_loss, found.figures.loss_since, found.recent_losses, found.metrics) == (0.0, 20, [], None)


def test_a_rank_that_was_not_there_takes_what_rank_0_has() -> None:
    assert read(LOOP, rank=3).last_logged == 10
    assert LoopState.read(point("loop_state_1.json", b"{}"), 0, 1) is None
    assert JobRecord.read(point("loop_state_1.json", b"{}")) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"tr_loss": "0.25x"},
        {"tr_loss": [1]},
        {"tr_loss": 10**400},
        {"last_logged": "10"},
        {"last_logged": None},
        {"metrics": []},
        {"metrics": {"entropy": "abc"}},
        {"metrics": {"entropy": ["a"]}},
        {"metrics": {"entropy": [10**400]}},
        {"train_tokens": "many"},
        {"total_loss": None},
        {"loss_since": "0"},
        {"grad_norm": "high"},
        {"learning_rate": True},
        {"recent_losses": [None]},
        {"recent_losses": 3},
        {"flos": [1]},
    ],
)
def test_a_loop_state_that_cannot_be_parsed_is_named(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"checkpoint-20: loop_state_0\.json "):
        read({**LOOP, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"made_for": {"world_size": 0, "batch_size": 1, "accumulation": 1}},
        {"made_for": {"world_size": 1}},
        {"made_for": None},
        {"stream": {}},
        {"job": 3},
    ],
)
def test_a_record_of_the_job_that_cannot_be_parsed_is_named(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"checkpoint-20: loop_state_0\.json "):
        JobRecord.read(point("loop_state_0.json", json.dumps({**LOOP, **changes}).encode()))


@pytest.mark.parametrize("name", [3, "a b", "", None])
def test_a_run_name_that_is_none_is_ignored(name: object) -> None:
    found = JobRecord.read(point("loop_state_0.json", json.dumps({"tracked_as": name}).encode()))
    assert found == JobRecord()


def test_the_last_figures_stand_in_where_a_step_has_none() -> None:
    figures = LoopFigures(1.0, 0.1)
    figures.update(None, None)
    assert (figures.grad_norm, figures.learning_rate) == (1.0, 0.1)
    figures.update(2.0, 0.2)
    assert (figures.grad_norm, figures.learning_rate) == (2.0, 0.2)


def test_the_mean_loss_is_that_of_the_run() -> None:
    assert LoopFigures(loss_since=10).mean_loss(30.0, 20) == 3.0
    assert LoopFigures(loss_since=20).mean_loss(0.0, 20) == 0.0


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_the_mean_of_what_was_added_up_is_kept_on_any_number_of_ranks(world_size: int) -> None:
    """After a change in mid interval, the next log entry had the losses of the ranks that were left."""
    losses = [1.0, 2.0, 4.5]
    files = {
        f"loop_state_{rank}.json": memoryview(json.dumps({**LOOP, "tr_loss": loss}).encode())
        for rank, loss in enumerate(losses)
    }
    shares = []
    for rank in range(world_size):
        here = LoadedCheckpoint(
            "here", step=12, world_size=3, samples_consumed=0, files=files, path=None, private=False
        )
        found = LoopState.read(here, rank, world_size)
        assert found is not None
        shares.append(float(found.tr_loss))
    assert sum(shares) / world_size == pytest.approx(sum(losses) / 3)
    assert world_size != 3 or shares == losses
