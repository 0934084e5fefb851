"""Each rank copies a share of a restored state to its accelerator; the others' shares come by the process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.process import broadcast
from checkpointing.process.broadcast import is_worthwhile, owners, to_device

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 10**12), max_size=60), st.integers(1, 9))
def test_ranks_copy_about_as_much(sizes: list[int], world_size: int) -> None:
    found = owners(sizes, world_size)
    copied = [
        sum(size for size, owner in zip(sizes, found, strict=True) if owner == rank) for rank in range(world_size)
    ]
    assert sum(copied) == sum(sizes) and found == owners(sizes, world_size)
    assert max(copied) - min(copied) <= max(sizes, default=0)


def state(fill: float) -> dict[str, Any]:
    large = torch.full((40, 10), fill)
    shared = torch.full((80, 10), fill)
    moments = {
        index: {"step": torch.tensor(fill), "exp_avg": torch.full((30, 9), fill).bfloat16()} for index in range(3)
    }
    return {"w": large, "alias": large, "half": shared[:40], "other": [shared[40:], {"state": moments, "lr": 0.1}]}


def test_what_others_own_comes_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "_SMALL_BYTES", 100)
    sent: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def placed(rank: int) -> Any:
        # What rank 0 has is 1.0 everywhere, and rank 1 has 2.0: whose it is can be seen.
        return to_device(state(1.0 + rank), CPU, rank, 2, lambda tensor, owner: sent[rank].append(tensor))

    found = [placed(rank) for rank in (0, 1)]
    assert [tensor.numel() for tensor in sent[0]] == [tensor.numel() for tensor in sent[1]] == [1600, 540, 540, 540]
    for rank, one in enumerate(found):
        # Aliases stay aliases; views of one memory, small tensors and numbers stay as they are.
        assert one["w"] is one["alias"]
        assert one["half"].untyped_storage().data_ptr() == one["other"][0].untyped_storage().data_ptr()
        assert float(one["other"][1]["state"][0]["step"]) == 1.0 + rank and one["other"][1]["lr"] == 0.1
    assert found[0]["w"][0, 0] == 1.0
    # The first tensor is rank 0's; rank 1 owns the next ones, until it has as many bytes.
    assert [float(found[1]["other"][1]["state"][index]["exp_avg"][0, 0]) for index in range(3)] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("device", "ranks", "local_ranks", "backends", "expected"),
    [
        ("cuda", 8, 8, "cpu:gloo,cuda:nccl", True),
        ("xpu", 4, 4, "cpu:gloo,xpu:xccl", True),
        ("cuda", 8, 8, "cpu:gloo,cuda:gloo", False),
        ("cuda", 1, 1, "cpu:gloo,cuda:nccl", False),
        ("cuda", 16, 8, "cpu:gloo,cuda:nccl", False),
        ("cpu", 2, 2, "cpu:gloo,cuda:nccl", False),
        ("xpu", 2, 2, "cpu:gloo,cuda:nccl", False),
    ],
)
def test_where_it_is_worthwhile(
    device: str, ranks: int, local_ranks: int, backends: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: backends)
    assert is_worthwhile(torch.device(device), ranks, local_ranks) is expected
