"""What a job is: what trains, on which data, and how its ranks share the samples of a step.

A rank whose share of a step makes fewer micro-batches than another rank's computes fillers, as DDP needs as many passes
of every rank. A loss that is the sum over all tokens of a step, divided by their number on all ranks, gives each token
the same weight wherever it is computed, and a filler without labels none at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset

from checkpointing.agent.events import BatchShape
from checkpointing.data.dealing import StepLayout
from checkpointing.data.position import data_digest, num_rows
from checkpointing.errors import CheckpointError
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.host.environment import ALLOW_CHANGES_ENV, rank_settings

# Packages whose trainers identify a training method.
_TRAINER_PACKAGES = ("transformers.", "trl.", "sentence_transformers.")
# Trainers whose `compute_loss` divides by the tokens of all ranks.
_WEIGHING = {("transformers.trainer", "Trainer"), ("trl.trainer.sft_trainer", "SFTTrainer")}


def job_of(trainer_class: type, train_dataset: Any) -> dict[str, str | None]:
    """Return what identifies a job; trainers may drop rows of the script's data when training begins."""
    # The script may have made a class of its own.
    library = next(base for base in trainer_class.__mro__ if base.__module__.startswith(_TRAINER_PACKAGES))
    return {
        "trainer": library.__name__,
        "number of training rows": num_rows(train_dataset),
        "training data": data_digest(train_dataset),
    }


def check_same_job(place: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare two values of `job_of`; what either of them does not know is not compared."""
    if rank_settings().allow_changes:
        return
    other = [key for key, value in before.items() if value is not None and now.get(key) not in (None, value)]
    if other:
        differences = ", ".join(f"{key} was {before[key]}, is {now[key]}" for key in other)
        raise CheckpointError(
            f"{place} is of another job: {differences}. Train in another output_dir; or, if it is the same job after a "
            f"change, resume with --allow-changes (or {ALLOW_CHANGES_ENV}=1)"
        )


@dataclass(frozen=True)
class DataRanks:
    """The data parallel ranks. With tensor parallelism, all ranks of a group are one: they compute the same samples."""

    rank: int = 0
    count: int = 1
    group_size: int = 1

    @classmethod
    def of(cls, trainer: Any) -> DataRanks:
        """Return those of a trainer. accelerate's meshes have the tensor parallel ranks next to each other."""
        size = tensor_parallel_size(trainer)
        return cls(trainer.args.process_index // size, trainer.args.world_size // size, size)

    @property
    def planned(self) -> int:
        """How many ranks the batch is meant for; an elastic run may begin with fewer."""
        return rank_settings().planned_ranks // self.group_size or self.count


def tensor_parallel_size(trainer: Any) -> int:
    """Return how many ranks share each layer: by how transformers has loaded the model, or by accelerate's mesh."""
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    return getattr(trainer.model, "_tp_size", None) or getattr(parallelism, "tp_size", None) or 1


def batch_shape(trainer: Any, shared_samples: int | None) -> BatchShape:
    """Return how the steps of a trainer are cut, for the supervisor; `shared_samples` as `TrainingData` has them."""
    return BatchShape(
        micro_batch=trainer._train_batch_size,
        accumulation=trainer.args.gradient_accumulation_steps,
        samples=shared_samples,
        model_ranks=tensor_parallel_size(trainer) * lone_copies(trainer),
    )


def lone_copies(trainer: Any) -> int:
    """Return how many ranks train the same samples, each by itself, where the Trainer has found no others.

    On a CPU accelerate distributes training with `use_cpu` only, whatever torchrun has started.
    """
    started: int = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return max(started // max(int(trainer.args.world_size), 1), 1)


def check_samples_per_step(point: LoadedCheckpoint | None, samples: int) -> None:
    """Check that a step has as many samples as those before the checkpoint."""
    if point is None or point.step == 0:
        return
    before = point.samples_consumed // point.step
    if before != samples:
        raise CheckpointError(
            f"{point.label} was trained with {before} samples per step, now there are {samples}. Choose "
            "per_device_train_batch_size and gradient_accumulation_steps so that batch x accumulation x ranks = "
            f"{before}, or start from the beginning in another output_dir."
        )


def fit_layout(was: StepLayout, world_size: int, batch_size: int, *, uneven: bool = False) -> StepLayout | None:
    """Divide the samples of a step among another number of ranks than there was when the run began.

    The micro-batches are the largest that are no larger than before, and than configured (`batch_size`). None if the
    number of ranks is the same, or they cannot share a step's samples equally, and may not do so unevenly.
    """
    share, rest = divmod(was.samples_per_step, world_size)
    if was.world_size == world_size or (rest and not uneven):
        return None
    largest = min(batch_size, was.batch_size)
    if rest:
        accumulation = math.ceil((share + 1) / largest)
        return StepLayout(world_size, math.ceil((share + 1) / accumulation), accumulation, was.samples_per_step)
    size = next(size for size in range(largest, 0, -1) if share % size == 0)
    return StepLayout(world_size, size, share // size)


def cut_micro_batches(args: Any, divisor: int) -> None:
    """Split each micro-batch of `TrainingArguments`: the same samples in each step, in smaller portions.

    The divisor is recorded with the run. Micro-batches that it does not divide, since they were configured smaller, are
    split by the largest common divisor.
    """
    divisor = math.gcd(args.per_device_train_batch_size, divisor)
    args.per_device_train_batch_size //= divisor
    args.gradient_accumulation_steps *= divisor


def can_be_uneven(trainer: Any) -> bool:
    """Return whether the ranks of a training may have different numbers of samples in a step."""
    args, data = trainer.args, trainer.train_dataset
    config = getattr(trainer.model, "config", None)
    return (
        # DeepSpeed's engine expects as many samples of each rank. Those of a stream are dealt while they are read.
        not trainer.is_deepspeed_enabled
        and hasattr(data, "__len__")
        and not isinstance(data, IterableDataset)
        # The loss gives each token of a step the same weight, on whichever rank it is.
        and all(_owner(trainer, name) in _WEIGHING for name in ("compute_loss", "training_step"))
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


def _owner(trainer: Any, name: str) -> tuple[str, str]:
    """Return module and name of the class that a trainer has a method from, besides this package's."""
    classes = (base for base in type(trainer).__mro__ if not base.__module__.startswith("checkpointing."))
    owner = next((base for base in classes if name in vars(base)), object)
    return owner.__module__, owner.__name__
