"""The layout of files that no node holds whole, with threads as ranks."""

from __future__ import annotations

from typing import Any

import torch
from helpers.thread_ranks import run_ranks

from checkpointing.commit.shard_reading import PartCache, PartReader, read_range
from checkpointing.commit.sharded_save import ShardedSave
from checkpointing.errors import CheckpointError
from checkpointing.files.file_images import (
    Extent,
    FileImage,
    PlacedFile,
    copy_literals,
    copy_tensors,
    placed_literals,
    shares,
)
from checkpointing.files.shard_layout import LocalWriters, ShardLayout
from checkpointing.format.digest import word_sum
from checkpointing.format.shard_index import ShardIndex, ShardParts
from checkpointing.process.device import HostDevice
from checkpointing.process.ranks import Ranks
from checkpointing.state.tensor_fingerprint import SourceSum

# A header, a matrix of 4 x 6 bytes that is cut by columns, and three bytes that all ranks hold.
FILE = bytes(range(100, 105)) + bytes(range(24)) + b"end"
MATRIX = torch.arange(24, dtype=torch.uint8).view(4, 6)


def image(rank: int, num_ranks: int) -> FileImage:
    width = 6 // num_ranks
    own = Extent(5 + rank * width, MATRIX[:, rank * width : (rank + 1) * width].contiguous(), (6,), MATRIX)
    literals = [(0, FILE[:5])]
    return FileImage("m", len(FILE), literals, [(29, torch.tensor(list(b"end"), dtype=torch.uint8))], [own])


def laid_out(ranks: Ranks) -> tuple[list[FileImage], bytes, ShardedSave, dict[str, bytes]]:
    """Lay the file out as one rank, and copy what it has of its shard."""
    shards, index, together = ShardLayout(ranks).lay_out([image(ranks.rank, ranks.world_size)])
    contents = {}
    for shard in shards:
        buffer, placed = memoryview(bytearray(shard.nbytes)), [PlacedFile(shard, 0)]
        copy_tensors(shares(placed, ranks.local_rank, ranks.local_world_size), buffer, HostDevice())
        copy_literals(placed_literals(placed), buffer)
        contents[shard.name] = bytes(buffer)
    return shards, index, together, contents


def test_the_shards_of_all_ranks_are_the_file() -> None:
    found = [one for one in run_ranks(laid_out, 3) if not isinstance(one, BaseException)]
    assert len(found) == 3 and all(one[2] == found[0][2] for one in found)
    # The node's first rank alone writes the index.
    assert [bool(one[1]) for one in found] == [True, False, False]
    assert found[0][2].shards == ("shards/0.bin", "shards/1.bin", "shards/2.bin")
    # Every rank of a node places the shards of all of them.
    assert all([shard.nbytes for shard in one[0]] == [shard.nbytes for shard in found[0][0]] for one in found)
    readers = {}
    for rank in range(3):
        data = memoryview(found[rank][3][f"shards/{rank}.bin"])

        def read_into(start: int, target: memoryview, data: memoryview = data) -> None:
            target[:] = data[start : start + len(target)]

        readers[rank] = PartReader(ShardParts.of(data), read_into, PartCache(), "")
    target = bytearray(len(FILE))
    read_range(ShardIndex.from_json(found[0][1]).files["m"], readers.__getitem__, 0, memoryview(target))
    assert bytes(target) == FILE


def test_each_node_has_its_own_shards() -> None:
    found = [one for one in run_ranks(laid_out, 3, per_node=1) if not isinstance(one, BaseException)]
    assert [[shard.name for shard in one[0]] for one in found] == [[f"shards/{rank}.bin"] for rank in range(3)]


def test_what_several_ranks_hold_is_written_by_the_first() -> None:
    """As tensors that are replicated over a part of the mesh of their own."""

    def lay_out(ranks: Ranks) -> int:
        shards, *_ = ShardLayout(ranks).lay_out([image(ranks.rank % 2, 2)])
        return len(shards[ranks.local_rank].own)

    # The columns and what all ranks hold, each with what fills its place up.
    assert run_ranks(lay_out, 4) == [5, 2, 0, 0]


def test_what_is_a_copy_says_of_which_tensor() -> None:
    """By which it is known whether its numbers have to be finite."""

    def lay_out(ranks: Ranks) -> list[bool]:
        shards, *_ = ShardLayout(ranks).lay_out([image(ranks.rank, 2)])
        return [extent.of is MATRIX for extent in shards[ranks.local_rank].own if extent.source.numel() == 12]

    assert run_ranks(lay_out, 2) == [[True], [True]]


def test_every_byte_of_a_shard_is_put_there_and_counted() -> None:
    """What else is in an arena is of an earlier snapshot; and only a sum of all bytes is compared."""

    def lay_out(ranks: Ranks) -> bytes:
        shards, *_ = ShardLayout(ranks).lay_out([image(ranks.rank, ranks.world_size)])
        placed, own = [PlacedFile(shards[ranks.local_rank], 0)], SourceSum()
        buffer = memoryview(bytearray(b"?" * shards[ranks.local_rank].nbytes))
        extents, literals = shares(placed, 0, 1), placed_literals(placed)
        copy_tensors(extents, buffer, HostDevice())
        copy_literals(literals, buffer)
        own.add(extents)
        assert own.total(buffer, literals) == (word_sum(buffer), len(buffer))
        return bytes(buffer)

    for ranks in (1, 2, 3):
        found: Any = run_ranks(lay_out, ranks)
        assert all(data and b"?" not in data for data in found), found


def test_a_file_that_is_not_all_there_is_refused_on_all_ranks() -> None:
    def lay_out(ranks: Ranks) -> object:
        return ShardLayout(ranks).lay_out([image(0, 2)])

    assert [type(found) for found in run_ranks(lay_out)] == [CheckpointError, CheckpointError]


def test_what_has_not_changed_is_not_exchanged_again() -> None:
    def lay_out(ranks: Ranks) -> bool:
        layout = ShardLayout(ranks)
        (_, before, first), (_, after, second) = (layout.lay_out([image(ranks.rank, 2)]) for _ in range(2))
        assert first.identity != second.identity
        return before is after

    assert run_ranks(lay_out) == [True, True]


def test_each_byte_is_copied_by_one_rank_of_a_node() -> None:
    """Two meshes of two ranks hold the same tensor, as under tensor parallelism one that only FSDP2 shards."""

    def left(ranks: Ranks) -> list[list[int]]:
        writers, found = LocalWriters(ranks), []
        for moment in range(3):
            # At first half of it each, then the ranks hold another split, as a second optimizer might bring.
            half = (ranks.rank + (moment == 2)) % 2
            own = [Extent(4 * half, torch.zeros(4, dtype=torch.uint8)), Extent(8, torch.zeros(1, dtype=torch.uint8))]
            image = FileImage("m", 9, own=own)
            writers.take_turns([image])
            found.append([extent.offset for extent in image.own])
        return found

    found: Any = run_ranks(left, 4)
    assert found == [[[0, 8], [0, 8], [4, 8]], [[4], [4], [0]], [[], [], []], [[], [], []]]
    # Every node holds all that its ranks copy.
    found = run_ranks(left, 4, per_node=2)
    assert found[2:] == found[:2] and found[0] == [[0, 8], [0, 8], [4, 8]]
