"""Make any Hugging Face `Trainer` (or `SFTTrainer`) save, resume and stop through a `CheckpointManager`.

    from checkpointing.transformers import resilient
    trainer = resilient(trainer)
    trainer.train()        # resumes from the newest valid checkpoint, if there is one

Training does not change: the trainer's own data loader, sampler, collator and callbacks are used. The Trainer still
decides when to save (`save_strategy`, `save_steps`), how many checkpoints to keep (`save_total_limit`) and how files
are named. How checkpoints are written is replaced, and snapshots are held in memory between two saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, Unpack

from transformers import Trainer
from transformers.trainer_utils import SaveStrategy

from checkpointing.commit.retention import FurtherRetention, best_by, retention_of
from checkpointing.commit.tiers import DEFAULT_LOCAL_KEEP_LAST
from checkpointing.data.dealing import check_virtual_ranks
from checkpointing.errors import CheckpointError
from checkpointing.files.sharding import has_sharded
from checkpointing.host.environment import rank_settings
from checkpointing.manager.manager import CheckpointManager, micro_batch_divisor
from checkpointing.snapshot.cadence import DEFAULT_OVERHEAD_CAP, Auto
from checkpointing.transformers.callback import remove_jit_checkpoints
from checkpointing.transformers.exact import AUTO
from checkpointing.transformers.seam import check_libraries
from checkpointing.transformers.train_call import ResilientOptions
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
    buddy_copies: bool = True,
    allow_non_finite: bool = False,
    local_tier: str | None = None,
    local_keep_last: int = DEFAULT_LOCAL_KEEP_LAST,
    check_finite: bool = True,
    spike_zscore: float | None = None,
    seekable_stream: bool = False,
    shuffle_samples: int | None = None,
    virtual_ranks: int | Auto | None = None,
    **retention: Unpack[FurtherRetention],
) -> TrainerT:
    """Give a trainer fault-tolerant checkpoints.

    If a step fails twice by `check_finite` or `spike_zscore`, it is skipped from then on, together with the steps since
    the snapshot before it: skipped steps count, but compute and change nothing. This requires a supervisor.

    `args.save_total_limit` is the number of checkpoints to keep; the best by `args.metric_for_best_model` is kept in
    addition. Overrides of `_save_checkpoint`, `save_model` and `_save` run at every commit, and the files that they add
    become part of the checkpoint. `on_save` is called once a checkpoint is committed, with the state of its step. A
    callback with `on_checkpoint_staged(args, state, control)` is called when that commit begins. `args.push_to_hub`
    uploads what is committed, in the background.

    Args:
        trainer: Changed in place.
        location: Directory or URL of the checkpoints; default: `args.output_dir`. A supervisor's choice takes
            precedence. Each location of a script is a stage of its own, also under a supervisor; see
            `CheckpointManager`.
        resume: "auto" (default), "never" or a step. A supervisor's choice takes precedence.
        states: Further objects with `state_dict` and `load_state_dict` that training changes, by name; for example, a
            moving average in a callback. State that differs between ranks is saved for each of them. Callbacks with
            `state_dict` and `load_state_dict`, transformers' `ExportableState` callbacks, and a reference model that
            TRL synchronises are saved without being named here.
        snapshot_steps: See `CheckpointManager`.
        save_steps: None leaves it to `args.save_strategy`; "auto" commits when it is worth the measured price, and
            ignores `args`.
        save_minutes: See `CheckpointManager`.
        overhead_cap: See `CheckpointManager`.
        memory_limit: See `CheckpointManager`.
        buddy_copies: See `CheckpointManager`.
        allow_non_finite: See `CheckpointManager`.
        local_tier: See `CheckpointManager`.
        local_keep_last: See `CheckpointManager`.
        check_finite: Raise NonFinite from `train` when a step's gradients are NaN or infinite, before anything of that
            step is kept. Under a supervisor, training resumes from the newest snapshot before it.
        spike_zscore: Raise LossSpike likewise when a step's loss, averaged over all ranks, is more than this number of
            robust standard deviations above the median of the last 64. None does not check.
        seekable_stream: Read a streamed data set by its own `state_dict`, so that a resumed run does not read it again
            up to its position, also on another number of ranks. The order is then the stream's, without the padding
            that accelerate adds at the end of an epoch. Otherwise the trainer's own loader is used, and read again.
        shuffle_samples: Number of samples of such a data set that are read ahead and shuffled; None keeps its order.
            Use it instead of `IterableDataset.shuffle`, whose buffer no checkpoint holds.
        virtual_ranks: Compute each step by so many virtual ranks, with the same bits on any number of ranks up to that
            ("auto": as many as there are when the run begins). For DDP; the number of micro-batches of a step is
            `virtual_ranks` x `gradient_accumulation_steps`. None computes as the Trainer does.
        **retention: What to keep besides: with `keep_every`, every checkpoint whose step is a multiple of it; with
            `keep_best`, so many best ones by `metric_for_best_model` (1 by default).

    Returns:
        The same trainer.

    Raises:
        CheckpointError: The trainer uses a strategy that is not supported, or transformers is too old; or the run
            counts on virtual ranks (`elastic.mode=exact`), and there are none here.
        ValueError: An option has a value that is not allowed.
    """
    retention_of(retention, resilient)
    _check_trainer(trainer)
    if save_steps not in (None, "auto"):
        raise ValueError(f"resilient(save_steps={save_steps!r}) is not allowed; set args.save_steps, or use 'auto'")
    if trainer.args.load_best_model_at_end and save_steps == "auto":
        raise ValueError(
            "resilient(save_steps='auto') cannot be combined with load_best_model_at_end, which needs save_strategy"
        )
    _check_spikes(trainer, spike_zscore)
    _check_stream(shuffle_samples, seekable_stream=seekable_stream)
    if save_steps == "auto":
        trainer.args.save_strategy = SaveStrategy.NO
    best_metric, greater_is_better = best_by(trainer.args.metric_for_best_model, trainer.args.greater_is_better)

    def make_manager() -> CheckpointManager:
        return CheckpointManager(
            location or trainer.args.output_dir,
            keep_last=trainer.args.save_total_limit,
            best_metric=best_metric,
            greater_is_better=greater_is_better,
            **retention,
            local_tier=local_tier,
            local_keep_last=local_keep_last,
            resume=resume,
            snapshot_steps=snapshot_steps,
            save_steps=save_steps,
            save_minutes=save_minutes,
            overhead_cap=overhead_cap,
            memory_limit=memory_limit,
            buddy_copies=buddy_copies,
            allow_non_finite=allow_non_finite,
        )

    remove_jit_checkpoints(trainer)
    cls = type(trainer)
    trainer.__class__ = type(f"Resilient{cls.__name__}", (ResilientMixin, cls), {})
    trainer._become_resilient(
        make_manager,
        ResilientOptions(
            states=dict(states or {}),
            divisor=1 if virtual_ranks else micro_batch_divisor(),
            virtual_ranks=_virtual_ranks(rank_settings().virtual_ranks_of(virtual_ranks)),
            on_host=micro_batch_divisor() > 1,
            saves_by_price=save_steps == "auto",
            check_finite=check_finite,
            spike_zscore=spike_zscore,
            seekable_stream=seekable_stream,
            shuffle_samples=shuffle_samples,
        ),
    )
    return trainer


def _check_trainer(trainer: Trainer) -> None:
    """Check that a trainer's kind of training is supported, and that it is not resilient already."""
    # Before 5.3, transformers' training loop is one method, which cannot be overridden in part.
    check_libraries(trainer)
    if trainer.is_deepspeed_enabled and not trainer.accelerator.state.deepspeed_plugin.zero_stage:
        raise CheckpointError("DeepSpeed without ZeRO is not supported; set zero_optimization.stage to 1, 2 or 3")
    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        raise CheckpointError("FSDP1 is not supported by resilient(); use FSDP2: fsdp_config version 2")
    if (kind := _unsupported_parallelism(trainer)) is not None:
        raise CheckpointError(
            f"{kind} parallelism is not supported by resilient() yet: use DDP, FSDP2 or tensor parallelism, or "
            "CheckpointManager in your own loop"
        )
    if isinstance(trainer, ResilientMixin):
        raise ValueError("resilient() was called on this trainer already")


def _check_spikes(trainer: Trainer, zscore: float | None) -> None:
    if zscore is not None and (zscore <= 0 or trainer.args.fp16):
        raise ValueError(
            f"resilient(spike_zscore={zscore}) is not allowed; use a number above 0, for example 8, and bf16 "
            "instead of fp16, whose scaler skips such steps itself"
        )


def _check_stream(shuffle_samples: int | None, *, seekable_stream: bool) -> None:
    if shuffle_samples is not None and shuffle_samples < 1:
        raise ValueError(f"resilient(shuffle_samples={shuffle_samples}) is not allowed; use a number from 1, or None")
    if shuffle_samples is not None and not seekable_stream:
        raise ValueError("resilient(shuffle_samples=...) needs seekable_stream=True")


def _virtual_ranks(count: int | Auto | None) -> int:
    """Return the number of virtual ranks, as `ResilientOptions` has it, unless memory was too small for them."""
    check_virtual_ranks(count)
    if count is None:
        return 0
    if micro_batch_divisor() > 2:
        raise CheckpointError(
            "out of memory, although the sums of gradients are in the host's memory: smaller micro-batches would end "
            "in other bits. Choose a smaller per_device_train_batch_size with more virtual ranks, in another output_dir"
        )
    return AUTO if count == "auto" else count


def load_best(trainer: Any) -> int | None:
    """Load the weights of the best checkpoint into the model of this rank, after training.

    Args:
        trainer: A trainer that `resilient` returned. If its model is sharded, and under DeepSpeed, all ranks must call
            this.

    Returns:
        The checkpoint's step; None if no checkpoint has the metric, and the model is left as it is.
    """
    trainer._track()
    together = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or has_sharded(trainer.model)
    step: int | None = trainer._manager.load_best(trainer.state.global_step, together=together)
    return step


def _unsupported_parallelism(trainer: Trainer) -> str | None:
    """Return the kind of parallelism that is used and not supported; None if there is none."""
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    distributed = getattr(getattr(trainer.model, "config", None), "distributed_config", None)
    sizes = {"context": getattr(parallelism, "cp_size", None), "sequence": getattr(parallelism, "sp_size", None)}
    sizes |= {"expert": getattr(distributed, "ep_size", None)}
    return next((kind for kind, size in sizes.items() if (size or 1) > 1), None)
