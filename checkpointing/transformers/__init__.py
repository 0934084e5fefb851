"""Makes any Hugging Face `Trainer` (or `SFTTrainer`) save, resume and stop through a `CheckpointManager`.

    from checkpointing.transformers import resilient
    trainer = resilient(trainer)
    trainer.train()        # resumes from the newest valid checkpoint, if there is one

What is trained stays as it is: the trainer's own data loader, sampler, collator and callbacks are used. So does what
the Trainer decides: when to save (`save_strategy`, `save_steps`), how many to keep (`save_total_limit`), the files'
names. How it is saved is replaced, and between two saves snapshots are held in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import accelerate
import transformers
from transformers import Trainer
from transformers.trainer_utils import SaveStrategy

from checkpointing.errors import CheckpointError
from checkpointing.rank.cadence import DEFAULT_OVERHEAD_CAP, Auto
from checkpointing.rank.manager import CheckpointManager, micro_batch_divisor
from checkpointing.retention import best_by
from checkpointing.tiers import DEFAULT_LOCAL_KEEP_LAST
from checkpointing.transformers.options import Options
from checkpointing.transformers.trainer import ResilientMixin

__all__ = ["resilient", "load_best"]

TrainerT = TypeVar("TrainerT", bound=Trainer)


def resilient(
    trainer: TrainerT,
    location: str | None = None,
    *,
    resume: str | int | None = None,
    states: Mapping[str, Any] | None = None,
    snapshot_steps: int | Auto | None = "auto",
    save_steps: Auto | None = None,
    save_minutes: float | None = None,
    overhead_cap: float = DEFAULT_OVERHEAD_CAP,
    memory_limit: int | str | None = None,
    keep_every: int | None = None,
    local_tier: str | None = None,
    local_keep_last: int = DEFAULT_LOCAL_KEEP_LAST,
    check_finite: bool = True,
    spike_zscore: float | None = None,
    seekable_stream: bool = False,
    shuffle_samples: int | None = None,
) -> TrainerT:
    """Give a trainer fault-tolerant checkpoints; returns the same object.

    Args:
        location: where checkpoints are kept; `args.output_dir` by default, a supervisor's choice goes first. Each
            location of a script is a stage of its own, also under a supervisor; see `CheckpointManager`.
        resume: "auto" (default), "never" or a step; a supervisor's choice goes first.
        states: further objects with `state_dict` and `load_state_dict` that training changes, by name: a moving average
            in a callback, say. What differs between ranks is kept for each of them. Callbacks with `state_dict` and
            `load_state_dict`, transformers' `ExportableState` callbacks, and a reference model that TRL synchronises
            are saved without being named here.
        save_steps: None leaves it to `args.save_strategy`; "auto" commits when it is worth the measured price, whatever
            `args` say.
        snapshot_steps, save_minutes, overhead_cap, memory_limit, keep_every, local_tier, local_keep_last: see
            `CheckpointManager`.
        check_finite: raise NonFinite from `train` when a step's gradients are infinite or NaN, before anything of that
            step is kept; under a supervisor training then resumes from the newest snapshot before it.
        spike_zscore: raise LossSpike likewise when a step's loss, averaged over all ranks, is further above the median
            of the last 64 than so many (robust) standard deviations; None does not look.
        seekable_stream: read a streamed data set by its own `state_dict`, so that a resumed run need not read it again
            up to its position, also on another number of ranks. The order is then the stream's, without the padding
            that accelerate adds at the end of an epoch. Without it the trainer's own loader is used, and read again.
        shuffle_samples: of such a data set, how many samples are read ahead and brought into random order; None
            leaves it in its own. In place of `IterableDataset.shuffle`, whose buffer no checkpoint holds.

    Steps that fail so twice are passed over from then on, with those since the snapshot before them: they count, but
    nothing is computed and nothing changes. That takes a supervisor.

    How many checkpoints are kept is `args.save_total_limit`; the best by `args.metric_for_best_model` stays besides.
    Overrides of `_save_checkpoint`, `save_model` and `_save` run at every commit; the files that they add are part of
    the checkpoint. `on_save` is called once a checkpoint is committed, with the state of its step. A callback with
    `on_checkpoint_staged(args, state, control)` is called when that commit begins.

    Raises:
        CheckpointError: the trainer uses a strategy that is not supported, or transformers is too old.
        ValueError: a cadence or the memory limit is not usable.
    """
    # Before 5.3 its training loop is one method, which offers no place to stand.
    if not hasattr(Trainer, "_run_epoch"):
        raise CheckpointError(
            f"transformers {transformers.__version__} is too old for resilient(); install 5.3 or newer, or use "
            "CheckpointManager in a loop of your own"
        )
    if trainer.is_deepspeed_enabled:
        raise CheckpointError("DeepSpeed is not supported by resilient() yet; use DDP or FSDP2")
    if trainer.is_fsdp_enabled:
        if not trainer.accelerator.is_fsdp2:
            raise CheckpointError("FSDP1 is not supported by resilient(); use FSDP2: fsdp_config version 2")
        if accelerate.utils.is_peft_model(trainer.model):
            raise CheckpointError("adapters under FSDP are not supported by resilient() yet; use DDP for them")
    if trainer.args.load_best_model_at_end and save_steps == "auto":
        raise ValueError(
            "resilient(save_steps='auto') does not go with load_best_model_at_end, which needs save_strategy"
        )
    if spike_zscore is not None and (spike_zscore <= 0 or trainer.args.fp16):
        raise ValueError(
            f"resilient(spike_zscore={spike_zscore}) is not allowed; write a number above 0, 8 for example, and use "
            "bf16 in place of fp16, whose scaler sees to such steps itself"
        )
    if shuffle_samples is not None and shuffle_samples < 1:
        raise ValueError(f"resilient(shuffle_samples={shuffle_samples}) is not allowed; use a number from 1, or None")
    if shuffle_samples is not None and not seekable_stream:
        raise ValueError("resilient(shuffle_samples=...) needs seekable_stream=True")
    if save_steps not in (None, "auto"):
        raise ValueError(f"resilient(save_steps={save_steps!r}) is not allowed; set args.save_steps, or use 'auto'")
    if isinstance(trainer, ResilientMixin):
        raise ValueError("resilient() was called on this trainer already")
    if save_steps == "auto":
        trainer.args.save_strategy = SaveStrategy.NO
    best_metric, greater_is_better = best_by(trainer.args.metric_for_best_model, trainer.args.greater_is_better)

    def make_manager() -> CheckpointManager:
        return CheckpointManager(
            location or trainer.args.output_dir,
            keep_last=trainer.args.save_total_limit,
            keep_every=keep_every,
            best_metric=best_metric,
            greater_is_better=greater_is_better,
            local_tier=local_tier,
            local_keep_last=local_keep_last,
            resume=resume,
            snapshot_steps=snapshot_steps,
            save_steps=save_steps,
            save_minutes=save_minutes,
            overhead_cap=overhead_cap,
            memory_limit=memory_limit,
        )

    # Validates what it is given; it reaches its agent when training begins.
    cls = type(trainer)
    trainer.__class__ = type(f"Resilient{cls.__name__}", (ResilientMixin, cls), {})
    trainer._become_resilient(
        make_manager,
        Options(
            states=dict(states or {}),
            divisor=micro_batch_divisor(),
            saves_by_price=save_steps == "auto",
            check_finite=check_finite,
            spike_zscore=spike_zscore,
            seekable_stream=seekable_stream,
            shuffle_samples=shuffle_samples,
        ),
    )
    return trainer


def load_best(trainer: Any) -> int | None:
    """After training: load the weights of the best checkpoint into the model, on this rank alone.

    Under FSDP all ranks must call it.

    Returns:
        Its step; None where none was evaluated when it was saved, and the model is left as it is.
    """
    trainer._track()
    step: int | None = trainer._manager.load_best(trainer.state.global_step, together=trainer.is_fsdp_enabled)
    return step
