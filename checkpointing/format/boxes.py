"""Which part of a tensor each rank of a mesh holds, from shapes and placements alone: no rank asks another.

A mesh dimension either replicates a tensor or cuts it along one of its dimensions, as `torch.chunk` does. What a rank
holds of a dimension is a list of ranges, one after the other in its own tensor: a single range, unless the cut is
strided (FSDP2 after tensor parallelism cuts what was cut already, while the mesh lists its own dimension first). A box
is one range of each dimension. Every box of a tensor in C order is a few equally long runs of bytes at equal distances.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checkpointing.format.shard_index import Piece

# First and last index (exclusive) of a dimension.
Range = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """How a mesh dimension of several ranks cuts a tensor.

    Attributes:
        dim: The tensor's dimension.
        split_factor: Number of parts that the dimension was in before, each of which is cut; 1 unless the cut is
            strided (`_StridedShard` of torch.distributed.tensor).
    """

    dim: int
    split_factor: int = 1


# For each mesh dimension; None replicates.
Placements = tuple[Cut | None, ...]


@dataclass(frozen=True)
class Box:
    """A part of a tensor that is contiguous in every dimension: its ranges, by dimension."""

    whole: tuple[Range, ...]  # in the whole tensor
    own: tuple[Range, ...]  # in the holder's own tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its size, by dimension."""
        return tuple(last - first for first, last in self.whole)


@dataclass(frozen=True)
class Region:
    """All that a rank holds of a tensor: for each dimension the ranges, in the order of the rank's own tensor."""

    ranges: tuple[tuple[Range, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rank's own tensor."""
        return tuple(sum(last - first for first, last in ranges) for ranges in self.ranges)

    def boxes(self) -> Iterator[Box]:
        """Yield the boxes, none of which is empty."""
        if 0 in self.shape:
            return
        for pairs in itertools.product(*map(_with_own, self.ranges)):
            yield Box(tuple(whole for whole, _ in pairs), tuple(own for _, own in pairs))


def region(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Placements, coordinate: Sequence[int]
) -> Region:
    """Compute what the rank at a coordinate of a mesh holds of a tensor; the mesh dimensions cut it one by one."""
    found: list[tuple[Range, ...]] = [((0, size),) for size in shape]
    for size, placement, index in zip(mesh_shape, placements, coordinate, strict=True):
        if placement is not None:
            found[placement.dim] = _cut(found[placement.dim], size, index, placement.split_factor)
    return Region(tuple(found))


def runs(box: Box, shape: Sequence[int], element_bytes: int) -> Piece:
    """Compute where a box, which is not empty, is in the memory of the whole tensor of a shape, in C order.

    There are as few runs as possible.
    """
    sizes = box.shape
    offset, length, distance = 0, element_bytes, element_bytes
    is_contiguous = True
    levels: list[tuple[int, int]] = []
    for (first, _), size, extent in zip(reversed(box.whole), reversed(sizes), reversed(shape), strict=True):
        offset += first * distance
        if is_contiguous:
            length *= size
        elif size > 1:
            levels.append((size, distance))
        is_contiguous = is_contiguous and size == extent
        distance *= extent
    return Piece(offset, length, tuple(reversed(levels)))


def writers(
    ranks: Sequence[int], mesh_shape: Sequence[int], placements: Placements, local_world_size: int
) -> dict[int, frozenset[int]]:
    """Find which rank of each node writes what several hold: of equal regions, that of the lowest rank.

    Args:
        ranks: The ranks of the mesh, in C order.
        mesh_shape: Number of ranks of each mesh dimension.
        placements: What each mesh dimension does.
        local_world_size: Number of ranks on each node.

    Returns:
        For each node that has ranks in the mesh, its ranks that write. The ranks of a node hold the whole tensor only
        if as many write as the mesh has different regions (`num_regions`).
    """
    found: dict[int, dict[tuple[int, ...], int]] = {}
    for rank, coordinate in zip(ranks, itertools.product(*map(range, mesh_shape)), strict=True):
        # A region is identified by the rank's place along the dimensions that cut.
        held = tuple(index for index, cut in zip(coordinate, placements, strict=True) if cut is not None)
        node = found.setdefault(rank // local_world_size, {})
        node[held] = min(rank, node.get(held, rank))
    return {node: frozenset(holders.values()) for node, holders in found.items()}


def num_regions(mesh_shape: Sequence[int], placements: Placements) -> int:
    """Return into how many regions a tensor is cut, some of which may be empty."""
    return math.prod(size for size, cut in zip(mesh_shape, placements, strict=True) if cut is not None)


def _cut(ranges: tuple[Range, ...], num_chunks: int, index: int, split_factor: int) -> tuple[Range, ...]:
    own = (0, sum(last - first for first, last in ranges))
    pieces = (_chunk(own, split_factor, number) for number in range(split_factor))
    picked = (_chunk(piece, num_chunks, index) for piece in pieces)
    return _joined(found for piece in picked for found in _select(ranges, piece))


def _chunk(whole: Range, num_chunks: int, index: int) -> Range:
    """Return one of the parts that `torch.chunk` makes, and empty ones where it makes fewer."""
    first, last = whole
    longest = -(-(last - first) // num_chunks)
    return min(first + index * longest, last), min(first + (index + 1) * longest, last)


def _select(ranges: tuple[Range, ...], wanted: Range) -> Iterator[Range]:
    """Yield what a range of a rank's own indices is in the whole dimension."""
    position = 0
    for first, last in ranges:
        begin, end = max(wanted[0] - position, 0), min(wanted[1] - position, last - first)
        if begin < end:
            yield first + begin, first + end
        position += last - first


def _joined(ranges: Iterator[Range]) -> tuple[Range, ...]:
    found: list[Range] = []
    for first, last in ranges:
        if found and found[-1][1] == first:
            found[-1] = found[-1][0], last
        else:
            found.append((first, last))
    return tuple(found)


def _with_own(ranges: tuple[Range, ...]) -> list[tuple[Range, Range]]:
    ends = itertools.accumulate(last - first for first, last in ranges)
    return [((first, last), (end - (last - first), end)) for (first, last), end in zip(ranges, ends, strict=True)]
