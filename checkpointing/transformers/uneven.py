"""Steps whose samples the ranks cannot share equally: who may have fewer, and how a filler counts for nothing.

A rank whose share of a step makes fewer micro-batches than another rank's computes fillers, as DDP needs as many passes
of every rank. A loss that is the sum over all tokens of a step, divided by their number on all ranks, gives each token
the same weight wherever it is computed, and a filler without labels none at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import IterableDataset

# What cross-entropy ignores.
_IGNORED = -100
_LABELS = ("labels", "shift_labels")
# Trainers whose `compute_loss` divides by the tokens of all ranks.
_WEIGHING = {("transformers.trainer", "Trainer"), ("trl.trainer.sft_trainer", "SFTTrainer")}


def can_be_uneven(trainer: Any) -> bool:
    """Return whether the ranks of a training may have different numbers of samples in a step.

    Args:
        trainer: A `transformers.Trainer`.
    """
    data = trainer.train_dataset
    # The samples of a stream are dealt while they are read. DeepSpeed's engine expects as many samples of each rank.
    return (
        not trainer.is_deepspeed_enabled
        and hasattr(data, "__len__")
        and not isinstance(data, IterableDataset)
        and weighs_by_tokens(trainer)
    )


def weighs_by_tokens(trainer: Any) -> bool:
    """Return whether a trainer's loss gives each token of a step the same weight, on whichever rank it is.

    Args:
        trainer: A `transformers.Trainer`.
    """
    args = trainer.args
    config = getattr(trainer.model, "config", None)
    return (
        all(_owner(trainer, name) in _WEIGHING for name in ("compute_loss", "training_step"))
        and bool(trainer.model_accepts_loss_kwargs)
        and trainer.compute_loss_func is None
        and bool(args.average_tokens_across_devices)
        and not args.label_smoothing_factor
        and not args.use_liger_kernel
        and args.n_gpu <= 1
        # An auxiliary loss is a mean over micro-batches.
        and not getattr(trainer, "aux_loss_enabled", False)
        and not getattr(config, "output_router_logits", False)
    )


def without_labels(batch: Any) -> Any:
    """Return a batch none of whose tokens counts.

    Raises:
        KeyError: It has no labels, so that this cannot be said.
    """
    if not any(name in batch for name in _LABELS):
        raise KeyError(f"a batch needs labels, and has {', '.join(map(str, batch))}")
    for name in _LABELS:
        if name in batch:
            batch[name] = torch.full_like(batch[name], _IGNORED)
    return batch


def _owner(trainer: Any, name: str) -> tuple[str, str]:
    """Return module and name of the class that a trainer has a method from, besides this package's."""
    classes = (base for base in type(trainer).__mro__ if not base.__module__.startswith("checkpointing."))
    owner = next((base for base in classes if name in vars(base)), object)
    return owner.__module__, owner.__name__
