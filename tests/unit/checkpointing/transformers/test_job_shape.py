"""Whether a checkpoint is of the same job, and how the ranks share the samples of a step."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from helpers.small_checkpoint import point
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer

from checkpointing.agent.events import BatchShape
from checkpointing.data.dealing import StepLayout
from checkpointing.errors import CheckpointError
from checkpointing.host.environment import ALLOW_CHANGES_ENV
from checkpointing.transformers import job_shape
from checkpointing.transformers.job_shape import (
    DataRanks,
    batch_shape,
    can_be_uneven,
    check_same_job,
    check_samples_per_step,
    cut_micro_batches,
    fit_layout,
    job_of,
    lone_copies,
)
from runner.session.admission import check_shares


class OwnTrainer(Trainer):
    pass


class Unread(Dataset[Any]):
    """A data set of the script's own, whose rows may not be read to look at them."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        raise AssertionError


def test_a_job_is_the_librarys_trainer_and_the_data() -> None:
    rows = [{"x": 1}, {"x": 2}]
    job = job_of(OwnTrainer, rows)
    assert job["trainer"] == "Trainer" and job == job_of(Trainer, list(rows))
    assert job != job_of(Trainer, rows[:1])
    assert job_of(Trainer, iter(rows))["training data"] is None
    # Of what may not be read the number of rows is known.
    assert job_of(Trainer, Unread(2)) == {"trainer": "Trainer", "number of training rows": "2", "training data": None}
    assert job_of(Trainer, iter(rows))["number of training rows"] is None


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


# -- which ranks share their samples -----------------------------------------------------------------------------------


def rank_of(rank: int, world_size: int, *, loaded: int | None = None, configured: int | None = None) -> Any:
    parallelism = SimpleNamespace(tp_size=configured) if configured is not None else None
    return SimpleNamespace(
        args=SimpleNamespace(process_index=rank, world_size=world_size),
        accelerator=SimpleNamespace(parallelism_config=parallelism),
        model=SimpleNamespace(_tp_size=loaded) if loaded is not None else SimpleNamespace(),
    )


@pytest.mark.parametrize("sizes", [{}, {"configured": 1}, {"loaded": 1}])
def test_without_tensor_parallelism_every_rank_has_its_own_samples(sizes: Any) -> None:
    assert [DataRanks.of(rank_of(rank, 4, **sizes)) for rank in range(4)] == [DataRanks(rank, 4) for rank in range(4)]


@pytest.mark.parametrize("sizes", [{"loaded": 2}, {"configured": 2}, {"loaded": 2, "configured": 2}])
def test_the_ranks_of_a_group_have_the_same_samples(sizes: Any) -> None:
    found = [DataRanks.of(rank_of(rank, 6, **sizes)) for rank in range(6)]
    assert [ranks.rank for ranks in found] == [0, 0, 1, 1, 2, 2]
    assert {(ranks.count, ranks.group_size, ranks.planned) for ranks in found} == {(3, 2, 3)}


def test_an_elastic_run_has_a_batch_for_the_ranks_that_were_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_shape, "rank_settings", lambda: SimpleNamespace(planned_ranks=8))
    assert DataRanks.of(rank_of(0, 4, loaded=2)).planned == 4


def test_a_supervisor_learns_which_ranks_share() -> None:
    own = rank_of(0, 4, loaded=2)
    own._train_batch_size, own.args.gradient_accumulation_steps = 3, 5
    assert batch_shape(own, 30) == BatchShape(micro_batch=3, accumulation=5, samples=30, model_ranks=2)


def test_ranks_that_the_trainer_has_not_found_compute_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = rank_of(0, 1)
    alone._train_batch_size, alone.args.gradient_accumulation_steps = 8, 1
    assert lone_copies(alone) == 1
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    assert lone_copies(alone) == 3 and lone_copies(rank_of(0, 3)) == 1
    shape = batch_shape(alone, None)
    assert shape.model_ranks == 3
    # A step of 8 samples is no division among three: a later start with as many ranks goes on.
    check_shares(8, 3, model_ranks=shape.model_ranks)


# -- whose loss gives each token the same weight on every rank, and what has no weight at all --------------------------


class Ours(Trainer):
    """As `resilient` makes it."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


Ours.__module__ = "checkpointing.transformers.trainer"


class OwnLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


ARGS = {
    "average_tokens_across_devices": True,
    "label_smoothing_factor": 0.0,
    "use_liger_kernel": False,
    "n_gpu": 0,
}


def trainer(cls: type = Ours, **changes: Any) -> Any:
    made: Any = object.__new__(cls)
    vars(made).update(
        args=SimpleNamespace(**{name: changes.pop(name, value) for name, value in ARGS.items()}),
        model=SimpleNamespace(config=SimpleNamespace(output_router_logits=changes.pop("output_router_logits", False))),
        model_accepts_loss_kwargs=True,
        compute_loss_func=None,
        is_deepspeed_enabled=False,
        train_dataset=[1, 2],
    )
    vars(made).update(changes)
    return made


@pytest.mark.parametrize("cls", [Trainer, Ours])
def test_the_trainers_own_loss_does(cls: type) -> None:
    assert can_be_uneven(trainer(cls))


@pytest.mark.parametrize(
    "changes",
    [
        {"cls": OwnLoss},
        {"cls": OwnStep},
        {"model_accepts_loss_kwargs": False},
        {"compute_loss_func": sum},
        {"average_tokens_across_devices": False},
        {"label_smoothing_factor": 0.1},
        {"use_liger_kernel": True},
        {"n_gpu": 2},
        {"aux_loss_enabled": True},
        {"output_router_logits": True},
    ],
    ids=str,
)
def test_others_need_not(changes: dict[str, Any]) -> None:
    assert not can_be_uneven(trainer(**changes))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize(("data", "can"), [([1, 2], True), (iter([1]), False), (Endless(), False), (None, False)])
def test_a_stream_is_dealt_while_it_is_read(data: Any, can: bool) -> None:
    assert can_be_uneven(trainer(train_dataset=data)) is can
    assert not can_be_uneven(trainer(OwnLoss, train_dataset=data))
    assert not can_be_uneven(trainer(train_dataset=data, is_deepspeed_enabled=True))
