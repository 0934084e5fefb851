"""What the loop keeps: from a trainer into files, and from the files into another trainer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.small_checkpoint import point
from transformers import TrainerState

from checkpointing.data.dealing import StepLayout
from checkpointing.data.stream import StreamPosition
from checkpointing.errors import InvalidCheckpoint
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.transformers.loop_state import (
    JobRecord,
    LoopFigures,
    LoopState,
    checked_directory,
    evaluated_metrics,
    is_number,
    state_file,
)

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


# -- trainer_state.json ------------------------------------------------------------------------------------------------


def trainer_state(**changes: Any) -> bytes:
    return json.dumps({**dataclasses.asdict(TrainerState(global_step=20, epoch=1.0)), **changes}).encode()


def test_a_sound_trainer_state_is_read_by_the_trainer() -> None:
    here = point("trainer_state.json", state_file(TrainerState(global_step=20, epoch=1.0))())
    state = TrainerState.load_from_json(str(Path(checked_directory(here), "trainer_state.json")))
    assert state.global_step == 20
    here.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"[" * 3000,
        trainer_state(unheard_of=1),  # TypeError
        # The Trainer would have gone on at another step than the optimizer.
        trainer_state(global_step=19),
        trainer_state(global_step="20"),
        trainer_state(log_history={"loss": 1}),
        trainer_state(log_history=[1]),
        trainer_state(stateful_callbacks=[1]),
        trainer_state(best_metric="high"),
        trainer_state(total_flos=10**400),
        trainer_state(best_model_checkpoint=3),
    ],
)
def test_a_trainer_state_that_cannot_be_parsed_is_named(data: bytes) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"checkpoint-20: trainer_state\.json "):
        checked_directory(point("trainer_state.json", data))


def test_a_trainer_refuses_a_checkpoint_of_a_bare_loop() -> None:
    with pytest.raises(InvalidCheckpoint, match=r"trainer_state\.json is not in it"):
        checked_directory(point("optimizer.pt", b""))


def test_the_file_is_of_the_moment_in_which_it_was_asked_for() -> None:
    state = TrainerState(global_step=20, log_history=[{"loss": 1.0, "step": 20}], stateful_callbacks={"A": {"n": 1}})
    file = state_file(state)
    expected = state_file(state)()
    state.global_step = 21
    state.log_history.append({"loss": 0.5, "step": 21})
    state.stateful_callbacks["A"]["n"] = 2
    assert file() == expected != state_file(state)()


def test_metrics_are_those_evaluated_at_this_very_step() -> None:
    history: list[Any] = [
        {"eval_loss": 3.0, "step": 10},
        {"loss": 1.0, "step": 20},
        {"eval_loss": 2.0, "eval_text": "long", "eval_runtime": 1, "step": 20},
    ]
    assert evaluated_metrics(TrainerState(global_step=20, log_history=history)) == {"eval_loss": 2.0, "eval_runtime": 1}
    assert evaluated_metrics(TrainerState(global_step=21, log_history=history)) == {}


@pytest.mark.parametrize(
    ("value", "expected"), [(1, True), (1.5, True), (float("nan"), True), (True, False), ("1", False), (10**400, False)]
)
def test_a_number_is_what_float_accepts(value: object, expected: bool) -> None:
    assert is_number(value) is expected


def test_it_says_the_same_whichever_rank_has_written_it() -> None:
    """Where another node leads, its first rank writes: the Trainer's file is always that of rank 0."""
    first, other = TrainerState(global_step=3), TrainerState(global_step=3)
    other.is_world_process_zero = other.is_local_process_zero = False
    assert state_file(first)() == state_file(other)()
    assert not other.is_world_process_zero
