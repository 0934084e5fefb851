"""A state that is not finite makes no snapshot."""

from __future__ import annotations

import math

import pytest
import torch
from small_training import SmallTraining

from checkpointing.errors import NonFinite
from checkpointing.rank.file_images import Extent, FileImage, bytes_of, place, shares
from checkpointing.rank.fingerprint import FINITE_TYPES, SourceSum

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


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("where", ["model", "optimizer"])
def test_training_ends_and_nothing_is_staged(value: float, where: str) -> None:
    job = SmallTraining(overlap=True)
    parameter = next(job.model.parameters())
    with torch.no_grad():
        (parameter if where == "model" else job.optimizer.state[parameter]["exp_avg"])[1, 2] = value
    job.snapshot()
    with pytest.raises(NonFinite, match=r"the state of step 1 is not finite \(" + where):
        job.snapshotter.settle()
    job.snapshotter.close()
    assert not job.arenas.staged_steps and "not finite" in job.arenas.abandoned[0]


def test_frozen_parameters_and_buffers_may_hold_anything() -> None:
    job = SmallTraining(overlap=True)
    linear, norm = job.model
    assert isinstance(linear, torch.nn.Linear) and isinstance(norm, torch.nn.BatchNorm1d)
    assert norm.running_mean is not None
    with torch.no_grad():
        norm.running_mean[0] = math.inf
        linear.bias[0] = -math.inf
        linear.bias.requires_grad_(False)
    job.snapshot()
    job.close()
    assert set(job.arenas.staged_steps) == {1}
