"""Who holds what of a tensor: compared with torch's own cutting of a tensor of indices, over random meshes."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from checkpointing.format.boxes import Box, Cut, Placements, Region, num_regions, region, runs, writers


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: Placements

    @property
    def coordinates(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*map(range, self.mesh)))

    def region(self, coordinate: tuple[int, ...]) -> Region:
        return region(self.shape, self.mesh, self.placements, coordinate)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    cut = st.builds(Cut, st.integers(0, len(shape) - 1), st.integers(1, 4))
    return Case(shape, mesh, tuple(draw(st.none() | cut) for _ in mesh))


def as_torch_cuts(case: Case, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The indices of the elements that a rank holds, cut by torch one mesh dimension after the other."""
    held = torch.arange(math.prod(case.shape)).view(case.shape)
    for size, cut, index in zip(case.mesh, case.placements, coordinate, strict=True):
        if cut is not None:
            placement = (
                Shard(cut.dim) if cut.split_factor == 1 else _StridedShard(cut.dim, split_factor=cut.split_factor)
            )
            held = placement._split_tensor(held, size, with_padding=False)[0][index]
    return held


def assembled(case: Case, found: Region) -> torch.Tensor:
    """The same from the boxes."""
    whole = torch.arange(math.prod(case.shape)).view(case.shape)
    held = torch.full(found.shape, -1)
    for box in found.boxes():
        held[tuple(slice(*bounds) for bounds in box.own)] = whole[tuple(slice(*bounds) for bounds in box.whole)]
    return held


@given(cases())
def test_a_region_is_what_torch_cuts(case: Case) -> None:
    for coordinate in case.coordinates:
        found = case.region(coordinate)
        expected = as_torch_cuts(case, coordinate)
        assert found.shape == tuple(expected.shape)
        assert torch.equal(assembled(case, found), expected)


@given(cases())
def test_runs_are_the_elements_of_a_box_in_the_whole_tensors_memory(case: Case) -> None:
    indices = torch.arange(math.prod(case.shape))
    for coordinate in case.coordinates:
        for box in case.region(coordinate).boxes():
            found = runs(box, case.shape, 1)
            assert found.nbytes == math.prod(box.shape) and 1 not in found.counts
            view = indices.as_strided((*found.counts, found.length), (*found.strides, 1), found.offset)
            expected = indices.view(case.shape)[tuple(slice(*bounds) for bounds in box.whole)]
            assert torch.equal(view.reshape(-1), expected.reshape(-1))


@given(cases(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_what_a_node_writes_is_all_that_it_holds_and_nothing_twice(
    case: Case, local_world_size: int, dice: object
) -> None:
    ranks = list(range(math.prod(case.mesh)))
    dice.shuffle(ranks)  # type: ignore[attr-defined]
    found = writers(ranks, case.mesh, case.placements, local_world_size)
    elements = {rank: as_torch_cuts(case, place) for rank, place in zip(ranks, case.coordinates, strict=True)}
    for node, writing in found.items():
        own = [rank for rank in ranks if rank // local_world_size == node]
        held = {int(index) for rank in own for index in elements[rank].flatten()}
        written = [int(index) for rank in writing for index in elements[rank].flatten()]
        assert sorted(written) == sorted(held) and writing <= set(own)
        assert (len(writing) == num_regions(case.mesh, case.placements)) <= (len(held) == math.prod(case.shape))


@pytest.mark.parametrize(
    ("shape", "whole", "offset", "levels", "length"),
    [
        # All of it, some rows, some columns, a column of rows, a scalar.
        ((4, 6), ((0, 4), (0, 6)), 0, (), 24),
        ((4, 6), ((1, 3), (0, 6)), 6, (), 12),
        ((4, 6), ((0, 4), (2, 4)), 2, ((4, 6),), 2),
        ((4, 6), ((2, 3), (2, 4)), 14, (), 2),
        ((2, 3, 4), ((0, 2), (1, 2), (0, 4)), 4, ((2, 12),), 4),
        ((2, 3, 4), ((0, 2), (1, 3), (1, 3)), 5, ((2, 12), (2, 4)), 2),
        ((), (), 0, (), 1),
    ],
)
def test_runs(
    shape: tuple[int, ...],
    whole: tuple[tuple[int, int], ...],
    offset: int,
    levels: object,
    length: int,
) -> None:
    found = runs(Box(whole, whole), shape, 1)
    assert (found.offset, found.levels, found.length) == (offset, levels, length)
    wide = runs(Box(whole, whole), shape, 4)
    assert (wide.offset, wide.length, wide.nbytes) == (4 * offset, 4 * length, 4 * found.nbytes)


def test_rows_that_were_cut_for_tensor_parallelism_are_cut_again_for_fsdp() -> None:
    """The example of torch's `_StridedShard`: 8 rows, a mesh of 2 (FSDP) by 2 (tensor parallel)."""
    placements = (Cut(0, split_factor=2), Cut(0))
    rows = [region((8, 8), (2, 2), placements, place).ranges[0] for place in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert rows == [((0, 2),), ((4, 6),), ((2, 4),), ((6, 8),)]
