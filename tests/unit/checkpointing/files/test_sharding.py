"""State that is sharded, on a process group of one rank: what stands in for it, and how it is cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.thread_ranks import run_ranks
from torch.distributed.tensor import Replicate, Shard

from checkpointing.errors import CheckpointError
from checkpointing.files import sharding
from checkpointing.files.file_images import Extent, FileImage, bytes_of, copy_tensors
from checkpointing.files.sharding import LocalWriters
from checkpointing.process.device import HostDevice
from checkpointing.process.ranks import Ranks


class FakeMesh:
    """The mesh of a rank, without a process group; compared by what it is."""

    def __init__(self, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> None:
        self.shape, self._coordinate = shape, coordinate
        self.mesh = torch.arange(math.prod(shape)).view(shape)

    def get_coordinate(self) -> list[int]:
        return list(self._coordinate)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def sharded(mesh: Any, rows: int = 4, dim: int = 0) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(torch.arange(rows * 2.0).view(rows, 2), mesh, [Shard(dim)], run_check=False)


def test_a_stand_in_has_the_size_of_the_whole_and_no_contents(mesh: Any) -> None:
    tensor, plain = sharded(mesh), torch.ones(3)
    parts: sharding.Parts = {}
    found = sharding.stand_ins({"a": tensor, "b": [tensor, plain]}, parts)
    assert found["a"] is found["b"][0] and found["b"][1] is plain
    assert found["a"].shape == (4, 2) and sharding.is_stand_in(found["a"], parts)
    assert not sharding.is_stand_in(plain, parts)
    (part,) = parts.values()
    assert part.region.shape == (4, 2) and part.is_written and torch.equal(part.tensor, tensor._local_tensor)


def test_a_change_in_place_is_seen_by_the_guards(mesh: Any) -> None:
    tensor = sharded(mesh)
    guards = sharding.part_of(tensor).guards
    before = [guard._version for guard in guards]
    tensor.add_(1)
    assert [guard._version for guard in guards] != before


def test_the_files_image_takes_the_ranks_part_in_place_of_the_stand_in(mesh: Any) -> None:
    parts: sharding.Parts = {}
    stand_in, plain = sharding.stand_ins([sharded(mesh), torch.ones(3)], parts)
    image = FileImage("m", 44, tensors=[(0, bytes_of(stand_in.view(-1))), (32, bytes_of(plain))])
    taken = sharding.take_over(image, parts)
    assert [offset for offset, _ in taken.tensors] == [32]
    (extent,) = taken.own
    assert extent.offset == 0 and torch.equal(extent.source.view(torch.float32), torch.arange(8.0))


def test_a_whole_tensor_is_cut_like_the_live_one(mesh: Any) -> None:
    whole, live = torch.arange(8.0).view(4, 2) + 1, sharded(mesh)
    cut = sharding.cut_like(whole, live)
    assert sharding.is_sharded(cut) and torch.equal(cut._local_tensor, whole)  # type: ignore[attr-defined]
    assert cut._local_tensor.data_ptr() != whole.data_ptr()  # type: ignore[attr-defined]
    assert sharding.cut_like(whole, torch.ones(4, 2)) is whole
    filled: Any = sharding.cut_like(whole, live, in_place=True)
    # Filling with what is there already changes nothing.
    sharding.fill(live, filled)
    assert filled is live and torch.equal(filled._local_tensor, whole)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2), (3, 2)])
@pytest.mark.parametrize("shape", [(4, 6), (5, 7), (2, 3, 5)])
def test_what_all_ranks_hold_is_the_whole_file_and_is_cut_again(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut along any dimension, twice along the same one, or replicated; with one process in place of all ranks."""
    size = math.prod(mesh_shape)
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    cuts = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    for placements in itertools.product(cuts, repeat=len(mesh_shape)):
        buffer = bytearray(whole.nbytes)
        for rank, coordinate in enumerate(itertools.product(*map(range, mesh_shape))):
            local = whole
            for placement, num, index in zip(placements, mesh_shape, coordinate, strict=True):
                if isinstance(placement, Shard):
                    local = placement._split_tensor(local, num, with_padding=False)[0][index]
            tensor: Any = SimpleNamespace(
                shape=whole.shape,
                device=whole.device,
                placements=placements,
                device_mesh=FakeMesh(mesh_shape, coordinate),
                _local_tensor=local,
            )
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            part = sharding.part_of(tensor, size)
            for extent in sharding._extents(part) if part.is_written else ():
                copy_tensors([extent], memoryview(buffer), HostDevice())
            assert torch.equal(sharding.own_part(whole, part), local), (placements, coordinate)
        assert torch.equal(torch.frombuffer(buffer, dtype=torch.float32).view(shape), whole), placements


@pytest.mark.parametrize(("rows", "held"), [(4, 3), (5, 5)])
def test_a_tensor_that_is_not_distributed_as_it_says_is_refused(rows: int, held: int, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor

    local = torch.zeros(held, 2)
    tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, 2)), stride=(2, 1))
    if rows == held:
        assert sharding.part_of(tensor).tensor.shape == (rows, 2)
    else:
        with pytest.raises(CheckpointError, match="use sizes that the mesh divides"):
            sharding.part_of(tensor)


def test_a_partial_sum_is_refused(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial

    with pytest.raises(CheckpointError, match="a partial sum is not state"):
        sharding.part_of(DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False))


def test_plain_state_is_left_as_it_is() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = optimizer.state_dict()
    assert not sharding.has_sharded(model) and sharding.cut_optimizer_state(state, optimizer) is state
    assert not sharding.is_spread(model, 1)


@pytest.mark.parametrize(
    ("shape", "placements", "per_node", "spread"),
    [
        ((4,), [Shard(0)], 4, False),
        ((4,), [Shard(0)], 2, True),
        ((2, 2), [Replicate(), Shard(0)], 2, False),
        ((2, 2), [Replicate(), Shard(0)], 1, True),
        ((2, 2), [Shard(0), Replicate()], 2, True),
        ((2, 2), [Replicate(), Replicate()], 1, False),
    ],
)
def test_a_model_is_spread_where_no_node_holds_all_of_it(
    shape: tuple[int, ...], placements: list[Any], per_node: int, spread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter = SimpleNamespace(device_mesh=FakeMesh(shape, (0,) * len(shape)), placements=placements)
    monkeypatch.setattr(sharding, "is_dtensor", lambda value: True)
    model: Any = SimpleNamespace(parameters=lambda: [parameter])
    assert sharding.is_spread(model, per_node) == spread


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
