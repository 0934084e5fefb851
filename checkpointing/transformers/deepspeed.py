"""Trainers whose model is in a DeepSpeed engine (`TrainingArguments(deepspeed=...)`, or accelerate's plugin)."""

from __future__ import annotations

from typing import Any

from checkpointing.errors import CheckpointError
from checkpointing.state.kinds.zero import is_engine


def check_deepspeed(trainer: Any) -> None:
    """Check that a trainer with DeepSpeed can be resumed.

    Raises:
        CheckpointError: It cannot; the message names the reason.
    """
    if not trainer.is_deepspeed_enabled:
        return
    if not trainer.accelerator.state.deepspeed_plugin.zero_stage:
        raise CheckpointError("DeepSpeed without ZeRO is not supported; set zero_optimization.stage to 1, 2 or 3")


def tracked_model(trainer: Any) -> Any:
    """Return the engine, once the trainer has made it; otherwise the trainer's model."""
    return trainer.model_wrapped if is_engine(trainer.model_wrapped) else trainer.model


def set_batch_shape(trainer: Any) -> None:
    """Have the engine's configuration follow `args`, which say how a step is cut.

    transformers fills it in when a trainer is made, and another number of ranks, or memory that ran out, may cut the
    same samples in another way.
    """
    if not trainer.is_deepspeed_enabled:
        return
    args, config = trainer.args, trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    config["train_micro_batch_size_per_gpu"] = batch
    config["gradient_accumulation_steps"] = accumulation
    config["train_batch_size"] = batch * accumulation * args.world_size


def skips_bad_steps(trainer: Any) -> bool:
    """Return whether steps without finite gradients are part of training: a loss scale is being searched for.

    DeepSpeed skips them in every precision. Where it does so without a loss scale, nothing would ever change again.
    """
    return trainer.accelerator.scaler is not None or bool(trainer.is_deepspeed_enabled and trainer.args.fp16)


def advance_schedule(trainer: Any) -> None:
    """Advance a schedule of DeepSpeed's own in a step that is skipped, and which the engine does not see."""
    if not is_engine(trainer.model_wrapped) or not trainer.accelerator.sync_gradients:
        return
    engine = trainer.model_wrapped
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.step()
