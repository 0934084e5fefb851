"""Whether a checkpoint is of the same job, and how its steps are divided among other ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.restore_points import point
from hypothesis import given
from hypothesis import strategies as st
from transformers import Trainer

from checkpointing.data.dealing import StepLayout
from checkpointing.errors import CheckpointError
from checkpointing.host.environment import ALLOW_CHANGES_ENV
from checkpointing.transformers.job_shape import (
    check_same_job,
    check_samples_per_step,
    cut_micro_batches,
    fit_layout,
    job_of,
)


class OwnTrainer(Trainer):
    pass


def test_a_job_is_the_librarys_trainer_and_the_data() -> None:
    rows = [{"x": 1}, {"x": 2}]
    job = job_of(OwnTrainer, rows)
    assert job["trainer"] == "Trainer" and job == job_of(Trainer, list(rows))
    assert job != job_of(Trainer, rows[:1])
    assert job_of(Trainer, iter(rows))["training data"] is None


def test_another_job_is_refused_by_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"trainer": "Trainer", "training data": "2:ab"}
    check_same_job("here", before, dict(before))
    # Older checkpoints know less, and so do data sets that cannot be looked at.
    check_same_job("here", {}, before)
    check_same_job("here", {**before, "training data": None}, before)
    check_same_job("here", before, {**before, "training data": None})
    other = {"trainer": "SFTTrainer", "training data": "2:ab"}
    with pytest.raises(CheckpointError, match="here is of another job: trainer was Trainer, is SFTTrainer"):
        check_same_job("here", before, other)
    monkeypatch.setenv(ALLOW_CHANGES_ENV, "1")
    check_same_job("here", before, other)


def test_another_number_of_samples_per_step_is_refused() -> None:
    here = point("file", b"")
    check_samples_per_step(here, 4)
    check_samples_per_step(None, 5)
    check_samples_per_step(point("file", b"", step=0), 5)
    with pytest.raises(CheckpointError, match="trained with 4 samples per step, now there are 5"):
        check_samples_per_step(here, 5)


@pytest.mark.parametrize(
    ("was", "world_size", "batch_size", "expected"),
    [
        (StepLayout(2, 4, 1), 2, 4, None),
        (StepLayout(2, 4, 1), 1, 4, StepLayout(1, 4, 2)),
        (StepLayout(2, 4, 1), 4, 4, StepLayout(4, 2, 1)),
        # No larger than configured: memory may be smaller here.
        (StepLayout(2, 4, 1), 1, 2, StepLayout(1, 2, 4)),
        # No larger than before.
        (StepLayout(2, 2, 2), 1, 8, StepLayout(1, 2, 4)),
        (StepLayout(2, 3, 1), 1, 2, StepLayout(1, 2, 3)),
        # Three ranks cannot share eight samples.
        (StepLayout(2, 4, 1), 3, 4, None),
    ],
)
def test_another_number_of_ranks_gets_the_same_samples_per_step(
    was: StepLayout, world_size: int, batch_size: int, expected: StepLayout | None
) -> None:
    assert fit_layout(was, world_size, batch_size) == expected


@given(st.builds(StepLayout, st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)), st.integers(1, 8))
def test_a_fitted_layout_never_changes_the_samples_per_step(was: StepLayout, world_size: int) -> None:
    now = fit_layout(was, world_size, was.batch_size)
    assert now is None or (now.samples_per_step == was.samples_per_step and now.batch_size <= was.batch_size)


@pytest.mark.parametrize(
    ("batch_size", "divisor", "expected"), [(8, 1, (8, 2)), (8, 2, (4, 4)), (8, 16, (1, 16)), (6, 4, (3, 4))]
)
def test_micro_batches_are_cut_and_accumulated_more_often(
    batch_size: int, divisor: int, expected: tuple[int, int]
) -> None:
    args: Any = SimpleNamespace(per_device_train_batch_size=batch_size, gradient_accumulation_steps=2)
    cut_micro_batches(args, divisor)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == expected
