"""State that is sharded, on a process group of one rank: what stands in for it, and how it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkpointing.errors import CheckpointError
from checkpointing.rank import sharding
from checkpointing.rank.file_images import FileImage, bytes_of


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def sharded(mesh: Any, rows: int = 4, dim: int = 0) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(torch.arange(rows * 2.0).view(rows, 2), mesh, [Shard(dim)], run_check=False)


def test_a_stand_in_has_the_size_of_the_whole_and_no_contents(mesh: Any) -> None:
    tensor, plain = sharded(mesh), torch.ones(3)
    parts: sharding.Parts = {}
    found = sharding.stand_ins({"a": tensor, "b": [tensor, plain]}, parts)
    assert found["a"] is found["b"][0] and found["b"][1] is plain
    assert found["a"].shape == (4, 2) and sharding.is_stand_in(found["a"], parts)
    assert not sharding.is_stand_in(plain, parts)
    (part,) = parts.values()
    assert part.rows == slice(0, 4) and part.offset == 0 and torch.equal(part.tensor, tensor._local_tensor)


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
    ((offset, flat),) = taken.own
    assert offset == 0 and torch.equal(flat.view(torch.float32), torch.arange(8.0))


def test_a_whole_tensor_is_cut_like_the_live_one(mesh: Any) -> None:
    whole, live = torch.arange(8.0).view(4, 2) + 1, sharded(mesh)
    cut = sharding.cut_like(whole, live)
    assert sharding.is_sharded(cut) and torch.equal(cut._local_tensor, whole)  # type: ignore[attr-defined]
    assert cut._local_tensor.data_ptr() != whole.data_ptr()  # type: ignore[attr-defined]
    assert sharding.cut_like(whole, torch.ones(4, 2)) is whole


def test_only_the_first_dimension_may_be_cut(mesh: Any) -> None:
    with pytest.raises(CheckpointError, match="only sharding along the first dimension"):
        sharding.part_of(sharded(mesh, dim=1))


def test_plain_state_is_left_as_it_is() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = optimizer.state_dict()
    assert not sharding.has_sharded(model) and sharding.cut_optimizer_state(state, optimizer) is state
    sharding.check_placement(model, 1)
