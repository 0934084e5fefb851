"""What a rank holds of a flattened tensor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkpointing.files import sharding
from checkpointing.files.fragments import Fragment, assembled, fragment_of, is_partitioned


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
