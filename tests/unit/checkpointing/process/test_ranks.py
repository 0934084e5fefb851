"""This process among the ranks, over a real group of one and without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.thread_ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.errors import CheckpointError
from checkpointing.host.environment import SETTINGS_ENV, RankSettings
from checkpointing.process import ranks as module
from checkpointing.process.ranks import Ranks, launched_place, owners, place_on_machine


def test_a_single_process_needs_no_group() -> None:
    ranks = Ranks.of_this_process()
    assert ranks == Ranks() and ranks.with_new_group().group is None and ranks.is_first
    assert ranks.gather("value") == ["value"] and ranks.broadcast("value") == "value"
    assert ranks.maximum(torch.tensor([1, 2])).tolist() == [1, 2]
    ranks.barrier()


def test_processes_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CheckpointError, match=r"2 processes were started .* call torch.distributed.init_process_group"):
        Ranks.of_this_process()


def test_ranks_are_read_from_the_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert Ranks.of_this_process() == Ranks(0, 1, 0, 1, None)
    finally:
        dist.destroy_process_group()


LAUNCHED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (LAUNCHED, (1, 2)),
        ({}, None),
        # Of torch.multiprocessing.spawn, in a process that torchrun has started as one of one.
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, None),
        ({**LAUNCHED, "RANK": "2"}, None),
        ({**LAUNCHED, "GROUP_WORLD_SIZE": "2"}, (1, 2)),
        ({**LAUNCHED, "GROUP_WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, None),
        ({name: value for name, value in LAUNCHED.items() if name != "LOCAL_RANK"}, None),
        ({**LAUNCHED, "LOCAL_WORLD_SIZE": ""}, None),
    ],
)
def test_a_launcher_counts_where_it_has_launched_these_ranks(environment: Any, place: Any) -> None:
    assert launched_place(3, 4, environment) == place


def test_ranks_of_no_launcher_are_counted_by_machine() -> None:
    """Each of those that a script had spawned took itself for the first of its node, and waited for the others."""
    assert [place_on_machine("aaa", rank) for rank in range(3)] == [(0, 3), (1, 3), (2, 3)]
    assert [place_on_machine("aab", rank) for rank in range(3)] == [(0, 2), (1, 2), (0, 1)]
    with pytest.raises(CheckpointError, match="do not follow each other"):
        place_on_machine("aba", 1)


def test_a_scripts_own_ranks_are_refused_under_a_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(SETTINGS_ENV, RankSettings(agent_socket="/agent").to_json())
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        with pytest.raises(CheckpointError, match=r"has made 1 ranks itself .*runner start --nproc-per-node 1"):
            Ranks.of_this_process()
    finally:
        dist.destroy_process_group()


def test_threads_stand_for_ranks_in_other_tests() -> None:
    def collectives(ranks: Ranks) -> tuple[list[int], int, list[int]]:
        most = ranks.maximum(torch.tensor([ranks.rank, -ranks.rank]))
        return ranks.gather(ranks.local_rank), ranks.broadcast(ranks.rank + 7), most.tolist()

    assert run_ranks(collectives, 4, per_node=2) == [([0, 1, 0, 1], 7, [3, 0])] * 4


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
    monkeypatch.setattr(module, "_SMALL_BYTES", 100)
    sent: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def placed(rank: int) -> Any:
        # What rank 0 has is 1.0 everywhere, and rank 1 has 2.0: whose it is can be seen.
        return Ranks(rank, 2).to_device(state(1.0 + rank), CPU, lambda tensor, owner: sent[rank].append(tensor))

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
    assert Ranks(0, ranks, 0, local_ranks).can_share_copies(torch.device(device)) is expected
