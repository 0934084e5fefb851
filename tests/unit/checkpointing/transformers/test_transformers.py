"""What the Trainer's loop left in a checkpoint, its digest right and its contents not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerState, TrainingArguments

from checkpointing.errors import CheckpointError, InvalidCheckpoint, NonFinite
from checkpointing.rank.restore_point import RestorePoint
from checkpointing.transformers import resilient
from checkpointing.transformers.callback import StepCallback
from checkpointing.transformers.trainer import ResilientMixin
from checkpointing.transformers.trainer_state import checked_directory, state_bytes

LOOP = {"tr_loss": 0.25, "last_logged": 10, "metrics": {"entropy": [0.5, 1]}, "train_tokens": 1000}


def point(name: str, data: bytes) -> RestorePoint:
    files = {name: memoryview(data)}
    return RestorePoint(
        "/runs/checkpoint-20", step=20, world_size=1, samples_consumed=80, files=files, path=None, private=True
    )


def trainer_state(**changes: Any) -> bytes:
    return json.dumps({**dataclasses.asdict(TrainerState(global_step=20, epoch=1.0)), **changes}).encode()


def test_a_transformers_without_the_loops_hooks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trained, and failed at the first save."""
    monkeypatch.delattr(Trainer, "_run_epoch")
    with pytest.raises(CheckpointError, match="too old for resilient"):
        resilient(Trainer(model=torch.nn.Linear(1, 1), args=TrainingArguments(str(tmp_path), report_to="none")))


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
def test_a_trainer_state_that_makes_no_sense_is_named(data: bytes) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"checkpoint-20: trainer_state\.json .* cannot be parsed"):
        checked_directory(point("trainer_state.json", data))


def test_a_checkpoint_of_a_bare_loop_is_told_to_a_trainer() -> None:
    with pytest.raises(InvalidCheckpoint, match=r"trainer_state\.json is not in it"):
        checked_directory(point("optimizer.pt", b""))


def restore_loop(data: bytes) -> SimpleNamespace:
    trainer = SimpleNamespace(
        args=SimpleNamespace(process_index=0),
        current_flos=0,
        _tr_loss=torch.tensor(0.5),
        _metrics={"train": {"entropy": [], "x": [1]}},
        _spikes=None,
    )
    ResilientMixin._restore_loop_state(trainer, point("loop_state_0.json", data))  # type: ignore[arg-type]
    return trainer


def test_the_loops_own_state_goes_on() -> None:
    trainer = restore_loop(json.dumps(LOOP).encode())
    assert (trainer._tr_loss.item(), trainer._globalstep_last_logged, trainer._total_train_tokens) == (0.75, 10, 1000)
    assert trainer._metrics["train"] == {"entropy": [0.5, 1], "x": [1]}
    assert torch.isnan(restore_loop(json.dumps({**LOOP, "tr_loss": float("nan")}).encode())._tr_loss)


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
    ],
)
def test_a_loop_state_that_makes_no_sense_is_named(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"checkpoint-20: loop_state_0\.json .* cannot be parsed"):
        restore_loop(json.dumps({**LOOP, **changes}).encode())


def test_tokens_are_counted_where_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("checkpointing.transformers.callback.time.monotonic", lambda: now[0])
    trainer: Any = SimpleNamespace(_num_ids=0)
    callback = StepCallback(trainer)
    assert callback._speed({"loss": 1.0}) == {}
    trainer._num_ids = 1000
    assert callback._speed({"loss": 1.0}) == {}
    now[0], trainer._num_ids = 12.0, 4000
    assert callback._speed({"eval_loss": 1.0}) == {} and callback._speed({"loss": 1.0}) == {"tokens_per_s": 1500.0}
    # TRL's own count, without padding, goes first.
    now[0] = 13.0
    assert callback._speed({"loss": 1.0, "num_tokens": 4100.0}) == {"tokens_per_s": 100.0}
    now[0], trainer._num_ids = 14.0, 50
    assert callback._speed({"loss": 1.0}) == {}


class Scaler:
    """In its place: what is asked is whether there is one."""


def judge(norm: float, *, scaler: Scaler | None, skipped: bool = False) -> None:
    flags = SimpleNamespace(should_save=False, should_evaluate=False)
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(global_step=5, max_steps=100),
        args=SimpleNamespace(world_size=1),
        accelerator=SimpleNamespace(scaler=scaler, optimizer_step_was_skipped=skipped),
        control=flags,
        _due=SimpleNamespace(snapshot=False),
        _unchecked=None,
        _step_loss=None,
        _check_finite=True,
        _spikes=None,
    )
    trainer._assert_good = lambda *known: ResilientMixin._assert_good(trainer, *known)
    ResilientMixin._judge_step(trainer, torch.tensor(norm))


def test_an_overflow_under_a_scaler_is_the_scalers() -> None:
    """A fused optimizer is called all the same, and skips the step itself: accelerate does not hear of it."""
    judge(float("inf"), scaler=Scaler(), skipped=False)
    judge(float("inf"), scaler=Scaler(), skipped=True)
    judge(1.0, scaler=None)
    with pytest.raises(NonFinite):
        judge(float("inf"), scaler=None)
