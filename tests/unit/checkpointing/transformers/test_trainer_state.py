"""`trainer_state.json`: checked before the Trainer reads it; what of the state goes into a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.restore_points import point
from transformers import TrainerState

from checkpointing.errors import InvalidCheckpoint
from checkpointing.transformers.loop_state import (
    checked_directory,
    evaluated_metrics,
    is_number,
    state_bytes,
    state_file,
)


def trainer_state(**changes: Any) -> bytes:
    return json.dumps({**dataclasses.asdict(TrainerState(global_step=20, epoch=1.0)), **changes}).encode()


def test_a_sound_trainer_state_is_read_by_the_trainer() -> None:
    here = point("trainer_state.json", state_bytes(TrainerState(global_step=20, epoch=1.0)))
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
    expected = state_bytes(state)
    state.global_step = 21
    state.log_history.append({"loss": 0.5, "step": 21})
    state.stateful_callbacks["A"]["n"] = 2
    assert file() == expected != state_bytes(state)


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
