"""Trainers whose model is in a DeepSpeed engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.errors import CheckpointError
from checkpointing.transformers import wrapped_models
from checkpointing.transformers.wrapped_models import check_deepspeed, set_batch_shape, tracked_model


def trainer(*, enabled: bool = True, stage: int = 2, **config: Any) -> Any:
    plugin = SimpleNamespace(zero_stage=stage, deepspeed_config=config)
    return SimpleNamespace(
        is_deepspeed_enabled=enabled,
        accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)),
        args=SimpleNamespace(per_device_train_batch_size=2, gradient_accumulation_steps=3, world_size=4),
        model="model",
        model_wrapped="wrapped",
    )


def test_zero_can_be_resumed() -> None:
    for stage in (1, 2, 3):
        check_deepspeed(trainer(stage=stage))
    check_deepspeed(trainer(enabled=False, stage=0))


def test_deepspeed_without_zero_is_refused() -> None:
    with pytest.raises(CheckpointError, match="without ZeRO is not supported; set zero_optimization"):
        check_deepspeed(trainer(stage=0))


def test_the_engine_learns_how_a_step_is_cut() -> None:
    subject = trainer(train_batch_size=8, gradient_clipping=1.0)
    set_batch_shape(subject)
    assert subject.accelerator.state.deepspeed_plugin.deepspeed_config == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "train_batch_size": 24,
        "gradient_clipping": 1.0,
    }


def test_without_deepspeed_nothing_is_set() -> None:
    subject = trainer(enabled=False)
    set_batch_shape(subject)
    assert subject.accelerator.state.deepspeed_plugin.deepspeed_config == {}


def test_the_engine_is_tracked_once_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracked_model(trainer()) == "model"
    monkeypatch.setattr(wrapped_models, "is_engine", lambda model: model == "wrapped")
    assert tracked_model(trainer()) == "wrapped"


@pytest.mark.parametrize(("enabled", "fp16", "skips"), [(True, False, False), (True, True, True), (False, True, False)])
def test_bad_steps_are_part_of_training_only_while_a_loss_scale_is_searched_for(
    enabled: bool, fp16: bool, skips: bool
) -> None:
    subject = trainer(enabled=enabled)
    subject.accelerator.scaler, subject.args.fp16 = None, fp16
    assert wrapped_models.skips_bad_steps(subject) is skips
    subject.accelerator.scaler = object()
    assert wrapped_models.skips_bad_steps(subject)


@pytest.mark.parametrize(("syncs", "advanced"), [(True, 1), (False, 0)])
def test_a_schedule_of_deepspeeds_own_advances_in_skipped_steps(
    syncs: bool, advanced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, steps = trainer(), list[int]()
    subject.accelerator.sync_gradients = syncs
    subject.model_wrapped = SimpleNamespace(lr_scheduler=SimpleNamespace(step=lambda: steps.append(1)))
    wrapped_models.advance_schedule(subject)
    assert steps == [], "no engine"
    monkeypatch.setattr(wrapped_models, "is_engine", lambda model: True)
    wrapped_models.advance_schedule(subject)
    assert len(steps) == advanced
    subject.model_wrapped.lr_scheduler = None
    wrapped_models.advance_schedule(subject)
