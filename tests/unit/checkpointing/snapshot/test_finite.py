"""A state that is not finite makes no snapshot."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from helpers.small_training import SmallTraining
from helpers.thread_ranks import run_ranks

from checkpointing.errors import NonFinite
from checkpointing.files.file_images import Extent, FileImage, bytes_of, place, shares
from checkpointing.process.ranks import Ranks
from checkpointing.state.tensor_fingerprint import FINITE_TYPES, SourceSum

BUILDING = threading.Lock()
VALUES = [math.nan, math.inf, -math.inf]


def found(tensor: torch.Tensor) -> bool:
    sums = SourceSum({tensor.untyped_storage().data_ptr(): tensor.dtype})
    sums.add([Extent(0, bytes_of(tensor))])
    return bool(sums.not_finite())


@pytest.mark.parametrize("kind", FINITE_TYPES)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("place", [0, 1, 777_777, 1_499_999])
def test_any_number_that_is_not_finite_is_found(kind: torch.dtype, value: float, place: int) -> None:
    tensor = torch.randn(1_500_000).to(kind)
    assert not found(tensor)
    tensor[place] = value
    assert found(tensor)


def test_a_copy_of_the_part_that_a_rank_writes_is_looked_at_too() -> None:
    tensor = torch.zeros(8, 8)
    tensor[3, 2] = math.nan
    part = tensor[:, 2:4].contiguous()
    sums = SourceSum({tensor.untyped_storage().data_ptr(): tensor.dtype})
    sums.add([Extent(0, bytes_of(part.view(8, 2)), (32,), tensor)])
    assert sums.not_finite() == [tensor.untyped_storage().data_ptr()]


@pytest.mark.parametrize("kind", FINITE_TYPES)
def test_great_numbers_are_finite(kind: torch.dtype) -> None:
    great = torch.finfo(kind).max
    assert not found(torch.full((3000,), great, dtype=kind)) and not found(torch.full((3000,), -great, dtype=kind))


@pytest.mark.parametrize("num_shares", [1, 2, 3, 7])
def test_no_element_is_cut_between_ranks(num_shares: int) -> None:
    tensors = [torch.zeros(size, dtype=torch.float64) for size in (1, 7, 130, 5)]
    offsets = [8, 64, 640, 4096]
    images = [FileImage("m", 8192, tensors=list(zip(offsets, map(bytes_of, tensors), strict=True)))]
    placed, _ = place(images)
    cut = [extent for share in range(num_shares) for extent in shares(placed, share, num_shares)]
    assert sum(extent.source.numel() for extent in cut) == 8 * 143
    assert all(extent.source.storage_offset() % 8 == 0 == extent.source.numel() % 8 for extent in cut)


def refused(job: SmallTraining) -> str:
    """What is said of a snapshot that must be refused; it is kept for people, marked."""
    job.snapshot()
    with pytest.raises(NonFinite, match="the state of step 1 is not finite") as caught:
        job.snapshotter.settle()
    job.snapshotter.close()
    assert job.arenas.not_finite == list(caught.value.tensors)
    return str(caught.value)


def accepted(job: SmallTraining) -> None:
    job.snapshot()
    job.close()
    assert set(job.arenas.staged_steps) == {1} and not job.arenas.not_finite


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("where", ["model", "optimizer"])
def test_training_ends_and_it_is_marked(value: float, where: str) -> None:
    job = SmallTraining(overlap=True)
    parameter = next(job.model.parameters())
    with torch.no_grad():
        (parameter if where == "model" else job.optimizer.state[parameter]["exp_avg"])[1, 2] = value
    assert f"({where}" in refused(job)


def test_frozen_parameters_may_hold_anything() -> None:
    job = SmallTraining(overlap=True)
    linear = job.model[0]
    assert isinstance(linear, torch.nn.Linear)
    with torch.no_grad():
        linear.bias[0] = -math.inf
        linear.bias.requires_grad_(False)
    accepted(job)


def set_mean(model: torch.nn.Module, value: float = math.inf) -> None:
    norm = model.get_submodule("1")
    assert isinstance(norm, torch.nn.BatchNorm1d) and norm.running_mean is not None
    norm.running_mean[0] = value


@pytest.mark.parametrize("value", VALUES)
def test_buffers_that_become_infinite_are_not_kept(value: float) -> None:
    job = SmallTraining(overlap=True)
    set_mean(job.model, value)
    assert "1.running_mean" in refused(job)


def test_buffers_that_were_infinite_from_the_beginning_are_masks() -> None:
    accepted(SmallTraining(overlap=True, before=set_mean))


def test_a_buffer_that_is_registered_later_may_hold_anything() -> None:
    job = SmallTraining(overlap=True)
    job.model.register_buffer("mask", torch.full((3,), -math.inf))
    accepted(job)


@pytest.mark.parametrize("scale", [*VALUES, 0.0])
def test_a_scaler_without_a_scale_is_not_kept(scale: float) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(1))
    job = SmallTraining(overlap=True, scaler=scaler)
    scaler.update(scale)
    assert "scaler: a scale of" in refused(job)


@pytest.mark.parametrize("enabled", [False, True])
def test_a_scaler_in_order_is_kept(enabled: bool) -> None:
    accepted(SmallTraining(overlap=True, scaler=torch.amp.GradScaler("cpu", enabled=enabled)))


def test_buffers_that_are_not_saved_or_not_plain_are_not_looked_at() -> None:
    def add(model: torch.nn.Module) -> None:
        model.register_buffer("adjacency", torch.eye(3).to_sparse(), persistent=False)
        model.register_buffer("later", torch.empty(3, device="meta"), persistent=False)
        model.register_buffer("cache", torch.zeros(3), persistent=False)

    job = SmallTraining(overlap=True, before=add)
    job.model.get_buffer("cache")[0] = math.nan
    accepted(job)


def with_a_broken_mean(ranks: Ranks, broken: int) -> SmallTraining:
    """A training on two ranks, one of whose running means is NaN, with a snapshot on its way."""
    # One after the other, as they draw from one generator.
    with BUILDING:
        job = SmallTraining(overlap=True, ranks=ranks)
    # The first optimizer step of one would wait for the other's snapshot: threads share torch's hooks.
    ranks.barrier()
    if ranks.rank == broken:
        set_mean(job.model, math.nan)
    job.snapshot()
    return job


def test_other_ranks_learn_of_a_rank_s_buffers() -> None:
    """Each node's agent must know: the one that writes may not be that of the rank that has found it."""

    def train(ranks: Ranks) -> tuple[list[str], list[str]]:
        job = with_a_broken_mean(ranks, 0)
        with pytest.raises(NonFinite) as caught:
            job.snapshotter.settle()
        job.snapshotter.close()
        return caught.value.tensors, job.arenas.not_finite

    assert run_ranks(train) == [(["1.running_mean"], ["1.running_mean"])] * 2


def test_buffers_of_other_ranks_may_be_what_they_like() -> None:
    """DDP copies those of rank 0 to them before each forward pass."""

    def train(ranks: Ranks) -> set[int]:
        job = with_a_broken_mean(ranks, 1)
        job.close()
        return set(job.arenas.staged_steps)

    assert run_ranks(train) == [{1}, {1}]
