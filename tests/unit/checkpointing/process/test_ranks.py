"""This process among the ranks, over a real group of one and without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.thread_ranks import run_ranks

from checkpointing.errors import CheckpointError
from checkpointing.process.ranks import Ranks


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


def test_threads_stand_for_ranks_in_other_tests() -> None:
    def collectives(ranks: Ranks) -> tuple[list[int], int, list[int]]:
        most = ranks.maximum(torch.tensor([ranks.rank, -ranks.rank]))
        return ranks.gather(ranks.local_rank), ranks.broadcast(ranks.rank + 7), most.tolist()

    assert run_ranks(collectives, 4, per_node=2) == [([0, 1, 0, 1], 7, [3, 0])] * 4
