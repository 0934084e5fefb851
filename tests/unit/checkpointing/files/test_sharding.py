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
from torch.distributed.tensor import Replicate, Shard

from checkpointing.errors import CheckpointError
from checkpointing.files import sharding
from checkpointing.files.file_images import FileImage, bytes_of, copy_tensors
from checkpointing.files.sharding import Fragment, assembled, fragment_of, is_partitioned
from checkpointing.process.device import HostDevice


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
    taken = sharding.with_own_parts(image, parts)
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


def partitioned(rank: int, monkeypatch: pytest.MonkeyPatch, *, ranks: int = 3) -> Any:
    """A parameter of (2, 4) elements, as ZeRO-3 leaves it on a rank: empty, with its share padded to equal sizes."""
    monkeypatch.setattr(dist, "get_rank", lambda group: rank)
    share = -(-8 // ranks)
    padded = torch.arange(ranks * share, dtype=torch.float32)
    own = padded[rank * share : (rank + 1) * share].clone()
    return SimpleNamespace(ds_tensor=own, ds_shape=(2, 4), ds_numel=8, ds_process_group=None, dtype=torch.float32)


@pytest.mark.parametrize(("rank", "first", "last"), [(0, 0, 3), (1, 3, 6), (2, 6, 8)])
def test_padding_is_no_part_of_a_parameter(rank: int, first: int, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fragment = fragment_of(partitioned(rank, monkeypatch))
    assert fragment is not None and (fragment.first, fragment.last) == (first, last)
    assert fragment.tensor.tolist() == list(map(float, range(first, last)))
    assert (fragment.shape, fragment.nbytes) == ((2, 4), 32)


def test_a_rank_may_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = partitioned(3, monkeypatch, ranks=5)
    parameter.ds_numel, parameter.ds_shape = 5, (5,)
    fragment = fragment_of(parameter)
    assert fragment is not None and fragment.tensor.numel() == 0 and fragment.first == fragment.last == 5
    assert list(sharding.part_of(fragment).region.boxes()) == []


def test_other_tensors_are_whole() -> None:
    assert not is_partitioned(torch.ones(2)) and fragment_of(torch.ones(2)) is None
    own = Fragment((2,), 0, torch.ones(1))
    assert fragment_of(own) is own and sharding.is_sharded(own) and not sharding.is_sharded(torch.ones(2))


def test_a_fragment_is_cut_and_filled() -> None:
    live = Fragment((2, 3), 2, torch.zeros(3))
    whole = torch.arange(6.0).view(2, 3)
    cut = sharding.cut_like(whole, live)
    sharding.fill(live, cut)
    assert cut.tolist() == [2.0, 3.0, 4.0] == live.tensor.tolist()
    # A step count, for example, belongs to the parameter, and is not cut.
    assert sharding.cut_like(torch.tensor(5.0), live).item() == 5.0


def test_a_stand_in_has_the_size_of_the_whole_and_the_parts_are_a_run_of_it() -> None:
    parts: sharding.Parts = {}
    found = sharding.stand_ins({"state": {0: {"moment": Fragment((2, 3), 2, torch.ones(3))}}}, parts)
    assert found["state"][0]["moment"].shape == (2, 3)
    (part,) = parts.values()
    assert part.shape == (6,) and part.is_written
    (extent,) = sharding._extents(part)
    assert (extent.offset, extent.source.numel(), extent.strides) == (8, 12, ())


def test_a_parameter_is_assembled(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        own = torch.arange(8.0)
        parameter = SimpleNamespace(ds_tensor=own, ds_shape=(2, 3), ds_numel=6, ds_process_group=dist.group.WORLD)
        assert torch.equal(assembled(parameter), torch.arange(6.0).view(2, 3))
    finally:
        dist.destroy_process_group()
