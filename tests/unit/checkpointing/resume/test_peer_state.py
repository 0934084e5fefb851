"""Nodes without a snapshot receive it from those that hold it, verified on both ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_checkpoint import Agent, network, snapshot, write_checkpoint
from helpers.thread_ranks import ThreadRanks, run_ranks

from checkpointing.agent.client import OfferedSnapshot
from checkpointing.commit.tiers import open_tiers
from checkpointing.format.layout import MODEL_NAME
from checkpointing.host.shared_memory import SharedMemory
from checkpointing.process.ranks import Ranks
from checkpointing.resume import peer_state
from checkpointing.resume.agreement import choose
from checkpointing.resume.peer_state import Held, Offer, held_by_nodes

TRAINING = network()
STORED, SENT = 10, 12


@pytest.mark.parametrize(
    ("attempts", "found"),
    [
        # By node; two ranks each.
        ([{}, {}], {}),
        ([{12: 1}, {12: 1}], {12: Held(1, (0, 2), True)}),
        ([{12: 1}, {}], {12: Held(1, (0,), False)}),
        ([{}, {12: 1}], {12: Held(1, (2,), False)}),
        # Another line of history: that of the newest attempt.
        ([{12: 1}, {12: 2}], {12: Held(2, (2,), False)}),
        # One that was cut off has more steps of a line that the others have left.
        ([{15: 1}, {13: 2}], {13: Held(2, (2,), False)}),
        ([{11: 1, 13: 2}, {11: 1}], {11: Held(1, (0, 2), True), 13: Held(2, (0,), False)}),
    ],
)
def test_which_snapshots_may_be_resumed_from(attempts: list[dict[int, int]], found: dict[int, Held]) -> None:
    assert held_by_nodes([Offer(2 * node, steps) for node, steps in enumerate(attempts) for _ in range(2)]) == found


def test_a_node_of_which_one_rank_lacks_it_does_not_hold_it() -> None:
    assert held_by_nodes([Offer(0, {12: 1}), Offer(0, {12: 1}), Offer(2, {12: 1}), Offer(2, {})]) == {
        12: Held(1, (0,), False)
    }


class Nodes:
    """Nodes of two ranks each; their agents hold what the test says."""

    def __init__(self, folder: Path, *held: Any) -> None:
        self._folder = folder
        self.agents = [Agent(folder, *([one] if one is not None else [])) for one in held]

    def resume(self) -> list[int | None]:
        """The step that each rank resumes from, and has whole."""

        def choice(ranks: Ranks) -> int | None:
            agent: Any = self.agents[ranks.rank // 2]
            point = choose(open_tiers(str(self._folder)), "auto", ranks, agent, private=True)
            if point is None:
                return None
            assert torch.equal(point.model_state()["weight"], TRAINING[0].weight)
            return point.step

        found = run_ranks(choice, 2 * len(self.agents), per_node=2)
        assert not [one for one in found if isinstance(one, BaseException)], found
        return found  # type: ignore[return-value]


@pytest.fixture
def senders(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ranks that send something, in small parts."""
    monkeypatch.setattr(peer_state, "_PART_BYTES", 64)
    found: list[int] = []
    transfer = ThreadRanks.transfer

    def noted(self: ThreadRanks, outgoing: Any, incoming: Any) -> None:
        found.extend([self.rank] if outgoing else [])
        transfer(self, outgoing, incoming)

    monkeypatch.setattr(ThreadRanks, "transfer", noted)
    return found


def test_several_holders_serve_a_node_that_has_nothing(tmp_path: Path, senders: list[int]) -> None:
    write_checkpoint(tmp_path, STORED, TRAINING)
    nodes = Nodes(tmp_path, None, snapshot(SENT, TRAINING), snapshot(SENT, TRAINING))
    assert nodes.resume() == [SENT] * 6
    assert sorted(senders) == [2, 4], "the first rank of each node that holds it"
    assert nodes.agents[0].events == [{"event": "resumed", "step": SENT, "source": "memory"}]


def test_what_holders_have_differently_comes_from_one_of_them(tmp_path: Path, senders: list[int]) -> None:
    """A file may say how long something took on its node."""
    first = snapshot(SENT, TRAINING)
    name = next(name for name in first.files if name != MODEL_NAME)
    files = {**first.files, name: memoryview(bytearray(first.files[name].nbytes))}
    second = OfferedSnapshot(first.info, files, {**first.digests, name: "another"})

    def received(ranks: Ranks) -> dict[str, bytes] | None:
        own = [first, second, None][ranks.rank // 2]
        found = peer_state.PeerState(ranks, Held(1, (0, 2), False), own).receive()
        return {name: bytes(data) for name, data in found.files.items()} if found is not None else None

    found = run_ranks(received, 6, per_node=2)
    whole = {name: bytes(data) for name, data in first.files.items()}
    assert found == [None] * 4 + [whole] * 2 and sorted(senders) == [0, 2]


def test_what_does_not_arrive_whole_is_not_used(
    tmp_path: Path, senders: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, STORED, TRAINING)
    transfer = ThreadRanks.transfer

    def flipped(self: ThreadRanks, outgoing: Any, incoming: Any) -> None:
        transfer(self, outgoing, incoming)
        if incoming:
            incoming[0][0][0] ^= 1

    monkeypatch.setattr(ThreadRanks, "transfer", flipped)
    nodes = Nodes(tmp_path, snapshot(SENT, TRAINING), None)
    assert nodes.resume() == [STORED] * 4 and senders == [0]
    assert SENT in nodes.agents[0].discarded


def test_a_holder_whose_memory_is_damaged_sends_nothing(tmp_path: Path, senders: list[int]) -> None:
    write_checkpoint(tmp_path, STORED, TRAINING)
    damaged = snapshot(SENT, TRAINING)
    damaged.files[MODEL_NAME][-1] ^= 1
    assert Nodes(tmp_path, damaged, None).resume() == [STORED] * 4 and senders == []


def test_a_node_without_memory_reads_storage_and_so_do_all(
    tmp_path: Path, senders: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, STORED, TRAINING)

    def full(name: str, nbytes: int) -> SharedMemory:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SharedMemory, "create", full)
    nodes = Nodes(tmp_path, snapshot(SENT, TRAINING), None)
    assert nodes.resume() == [STORED] * 4 and senders == []


def test_a_snapshot_of_a_line_that_others_have_left_is_not_brought_back(tmp_path: Path) -> None:
    """The nodes that went on have committed, and were replaced since."""
    storage = write_checkpoint(tmp_path, STORED, TRAINING)
    assert storage.read_manifest(STORED).attempt == 1
    assert Nodes(tmp_path, snapshot(SENT, TRAINING, attempt=0), None).resume() == [STORED] * 4
    assert Nodes(tmp_path, snapshot(SENT, TRAINING, attempt=1), None).resume() == [SENT] * 4


def test_nothing_is_left_behind(tmp_path: Path, senders: list[int]) -> None:
    before = threading.active_count()
    assert Nodes(tmp_path, snapshot(SENT, TRAINING), None).resume() == [SENT] * 4
    assert threading.active_count() == before


def test_received_memory_lives_no_longer_than_what_is_read_from_it(tmp_path: Path, senders: list[int]) -> None:
    """A descriptor kept as much memory as the state has, on each rank, until the attempt ended."""

    def received() -> list[str]:
        links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.exists()]
        maps = Path("/proc/self/maps").read_text().splitlines()
        return [text for text in [*links, *maps] if "checkpoint-received" in text]

    assert Nodes(tmp_path, snapshot(SENT, TRAINING), None).resume() == [SENT] * 4
    gc.collect()
    assert received() == []


OVER_GLOO = """
import os, sys
import torch.distributed as dist
from checkpointing.process.ranks import Ranks
rank, folder = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo", init_method="file://" + folder + "/group", rank=rank, world_size=3)
ranks = Ranks(rank, 3, 0, 1).with_new_group()
mine = memoryview(bytearray([rank + 1]) * 3_000_000)
memory = memoryview(bytearray(4_000_001))
if rank == 2:
    # Posted in another order than they are sent.
    ranks.transfer([], [(memory[2_000_000:], 1, 1), (memory[:2_000_000], 0, 0)])
else:
    ranks.transfer([(mine[: 2_000_000 + rank], 2, rank)], [])
assert rank != 2 or bytes(memory) == bytes([1]) * 2_000_000 + bytes([2]) * 2_000_001
dist.destroy_process_group()
"""


@pytest.mark.process
def test_over_a_real_process_group(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OVER_GLOO, str(tmp_path)]
    ranks = [subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}) for rank in range(3)]
    assert [rank.wait(120) for rank in ranks] == [0, 0, 0]
