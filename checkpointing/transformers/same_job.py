"""Whether a checkpoint belongs to this job: what trains, on which data, and how its steps are divided."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from checkpointing.data.dealing import StepLayout
from checkpointing.data.position import fingerprint
from checkpointing.errors import CheckpointError
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.host.environment import ALLOW_CHANGES_ENV, rank_settings

# Packages whose trainers identify a training method.
_TRAINER_PACKAGES = ("transformers.", "trl.", "sentence_transformers.")


def job_of(trainer_class: type, train_dataset: Any) -> dict[str, str | None]:
    """Return what identifies a job, as far as the trainer knows.

    Args:
        trainer_class: Counts by the library's class that it derives from: the script may have made one of its own.
        train_dataset: As the script passes it; trainers may drop rows when training begins.
    """
    library = next(base for base in trainer_class.__mro__ if base.__module__.startswith(_TRAINER_PACKAGES))
    return {"trainer": library.__name__, "training data": fingerprint(train_dataset)}


def check_same_job(place: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare two values of `job_of`; what either of them does not know is not compared.

    Args:
        place: The checkpoint, for messages.
        before: The job that wrote it.
        now: This job.

    Raises:
        CheckpointError: They differ, and the user has not allowed changes.
    """
    if rank_settings().allow_changes:
        return
    other = [key for key, value in before.items() if value is not None and now.get(key) not in (None, value)]
    if other:
        differences = ", ".join(f"{key} was {before[key]}, is {now[key]}" for key in other)
        raise CheckpointError(
            f"{place} is of another job: {differences}. Train in another output_dir; or, if it is the same job after a "
            f"change, resume with --allow-changes (or {ALLOW_CHANGES_ENV}=1)"
        )


def check_samples_per_step(point: LoadedCheckpoint | None, samples: int) -> None:
    """Check that a step has as many samples as those before the checkpoint.

    Raises:
        CheckpointError: It has more or fewer.
    """
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
    """Divide the samples of a step among another number of ranks.

    Args:
        was: The layout when the run began.
        world_size: Number of ranks now.
        batch_size: Samples per micro-batch and rank, as configured.
        uneven: Whether some ranks may have fewer samples than others.

    Returns:
        The layout with the largest micro-batches that are no larger than before, and than configured. None if the
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
