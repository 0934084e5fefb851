"""Which state all ranks resume from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_checkpoint import Agent, network, snapshot, write_checkpoint
from helpers.spread_checkpoint import ROWS, STATE, files_of
from helpers.thread_ranks import run_ranks

from checkpointing.agent.client import OfferedSnapshot
from checkpointing.commit.tiers import Tiers, open_tiers
from checkpointing.errors import InvalidCheckpoint, NoValidCheckpoint, StorageUnreachable
from checkpointing.format.digest import digest_buffer
from checkpointing.format.layout import MODEL_NAME
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.format.shard_index import INDEX_NAME, shard_name
from checkpointing.process.ranks import Ranks
from checkpointing.resume.agreement import choose, own_checkpoint
from checkpointing.resume.verified_read import read_checkpoint
from checkpointing.storage import LocalStorage

TRAINING = network()


def chosen(tiers: Tiers, agent: Any, resume: str | int = "auto", ranks: Ranks | None = None) -> int | None:
    point = choose(tiers, resume, ranks or Ranks(), agent, private=True)
    if point is None:
        return None
    assert torch.equal(point.model_state()["weight"], TRAINING[0].weight)
    return point.step


def damage(folder: Path, step: int) -> None:
    path = folder / f"checkpoint-{step}" / MODEL_NAME
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_run_without_checkpoints_starts_from_the_beginning(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    assert chosen(open_tiers(str(tmp_path / "run")), agent) is None and agent.events == []


def test_the_newest_checkpoint_is_chosen_unless_another_is_asked_for(tmp_path: Path) -> None:
    for step in (10, 20):
        write_checkpoint(tmp_path, step, TRAINING)
    agent, tiers = Agent(tmp_path), open_tiers(str(tmp_path))
    assert [chosen(tiers, agent, resume) for resume in ("auto", 10, "never")] == [20, 10, None]
    assert agent.events == [{"event": "resumed", "step": step, "source": "local"} for step in (20, 10)]
    with pytest.raises(NoValidCheckpoint, match=r"--resume 15: "):
        chosen(tiers, agent, 15)


def test_a_damaged_checkpoint_is_quarantined(tmp_path: Path) -> None:
    for step in (10, 20):
        write_checkpoint(tmp_path, step, TRAINING)
    damage(tmp_path, 20)
    agent, tiers = Agent(tmp_path), open_tiers(str(tmp_path))
    with pytest.raises(NoValidCheckpoint, match=r"--resume 20: .*model\.safetensors was altered"):
        chosen(tiers, agent, 20)
    assert (tmp_path / "checkpoint-20").is_dir()
    assert chosen(tiers, agent) == 10
    assert not (tmp_path / "checkpoint-20").exists() and agent.events[0]["step"] == 20
    damage(tmp_path, 10)
    with pytest.raises(NoValidCheckpoint, match="holds checkpoints but none is valid"):
        chosen(tiers, agent)


def test_a_snapshot_goes_before_an_older_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, TRAINING)
    agent = Agent(tmp_path, snapshot(12, TRAINING))
    assert chosen(open_tiers(str(tmp_path)), agent) == 12
    assert agent.events == [{"event": "resumed", "step": 12, "source": "memory"}]
    assert chosen(open_tiers(str(tmp_path)), agent, 10) == 10


def test_a_damaged_snapshot_is_discarded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, TRAINING)
    damaged = snapshot(12, TRAINING)
    damaged.files[MODEL_NAME][-1] ^= 1
    agent = Agent(tmp_path, damaged)
    assert chosen(open_tiers(str(tmp_path)), agent) == 10 and agent.discarded == [12]


@pytest.mark.parametrize(("others", "step"), [([12], 12), ([], 12), ([13], 13), ([9], 12)])
def test_a_node_receives_the_snapshot_that_it_lacks(others: list[int], step: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, TRAINING)
    agents = [Agent(tmp_path, snapshot(12, TRAINING)), Agent(tmp_path, *(snapshot(one, TRAINING) for one in others))]

    def choice(ranks: Ranks) -> int | None:
        return chosen(open_tiers(str(tmp_path)), agents[ranks.rank], ranks=ranks)

    assert run_ranks(choice, 2, per_node=1) == [step, step]


def test_of_the_same_step_the_newest_attempts_snapshot_counts(tmp_path: Path) -> None:
    agents = [Agent(tmp_path, snapshot(12, TRAINING, attempt=attempt)) for attempt in (1, 2)]

    def choice(ranks: Ranks) -> int | None:
        return chosen(open_tiers(str(tmp_path)), agents[ranks.rank], ranks=ranks)

    assert run_ranks(choice, 2, per_node=1) == [12, 12]


def share(*ranks: int, step: int = 12, identity: str = "ab") -> OfferedSnapshot:
    """A node's share of a snapshot whose model is spread over two: the shards of its rank, or those of both."""
    contents = files_of(ROWS)
    names = [*map(shard_name, ranks), INDEX_NAME, "rng_state.pth"]
    files = {name: memoryview(bytearray(contents[name])) for name in names}
    digests = {name: digest_buffer(view) for name, view in files.items()}
    return OfferedSnapshot(SnapshotInfo("run", 1, step, 2, step), files, digests, save=identity)


WHOLE_STATE = {name: tensor.tolist() for name, tensor in STATE.items()}


def of_shares(agents: Sequence[Any], folder: Path) -> list[Any]:
    """Return where each of two ranks resumes from, and what it can read of the model then."""

    def choice(ranks: Ranks) -> Any:
        point = choose(open_tiers(str(folder)), "auto", ranks, agents[ranks.rank], private=True)
        assert point is not None
        if point.spread is None:
            return point.step
        state = point.model_state()
        point.spread.fill(MODEL_NAME, state)
        found = point.step, {name: tensor.tolist() for name, tensor in state.items()}
        point.end_reading()
        return found

    return run_ranks(choice, 2, per_node=1)


def test_shares_of_all_nodes_are_resumed_from_while_they_are_being_saved(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, TRAINING)
    agents = [Agent(tmp_path, share(rank), saving=12) for rank in range(2)]
    assert of_shares(agents, tmp_path) == [(12, WHOLE_STATE)] * 2
    assert [agent.waited for agent in agents] == [[False]] * 2
    assert agents[0].events == [{"event": "resumed", "step": 12, "source": "memory"}]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_without_a_share_reads_the_copy_that_another_one_keeps(lost: int, tmp_path: Path) -> None:
    """And all else that is not in shards."""
    write_checkpoint(tmp_path, 10, TRAINING)
    agents = [Agent(tmp_path), Agent(tmp_path, share(0, 1))]
    agents = agents if lost == 0 else agents[::-1]
    assert of_shares(agents, tmp_path) == [(12, WHOLE_STATE)] * 2
    assert agents[0].events == [{"event": "resumed", "step": 12, "source": "memory"}]


def test_a_damaged_copy_is_not_used(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, TRAINING)
    agents = [Agent(tmp_path, share(0, 1)), Agent(tmp_path)]
    agents[0]._snapshots[0].files[shard_name(1)][0] ^= 1
    assert of_shares(agents, tmp_path) == [10, 10]
    assert agents[0].discarded == [12]


def test_a_share_that_another_node_lacks_is_waited_for_and_not_used(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, TRAINING)
    for other in (Agent(tmp_path), Agent(tmp_path, share(1, identity="cd"))):
        agents = [Agent(tmp_path, share(0), saving=12), other]
        assert of_shares(agents, tmp_path) == [10, 10]
        assert [agent.waited for agent in agents] == [[False, True]] * 2


def test_an_older_share_is_not_used_while_a_newer_one_is_being_saved(tmp_path: Path) -> None:
    """It would be a checkpoint ahead of what trains then."""
    write_checkpoint(tmp_path, 10, TRAINING)
    newer, older = (share(0), share(0, step=11)), (share(1, step=11),)
    agents = [Agent(tmp_path, *newer, saving=12), Agent(tmp_path, *older)]
    assert [found[0] for found in of_shares(agents, tmp_path)] == [11, 11]
    assert [agent.waited for agent in agents] == [[False, True]] * 2


def test_a_share_is_not_used_where_a_newer_attempt_has_left_a_whole_snapshot(tmp_path: Path) -> None:
    """One node continued alone, and held all of the state."""
    agents = [Agent(tmp_path, share(0), snapshot(11, TRAINING, attempt=2)), Agent(tmp_path, share(1))]
    assert of_shares(agents, tmp_path) == [11, 11]


def test_a_damaged_share_is_used_by_no_node_and_its_save_is_waited_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, TRAINING)
    agents = [Agent(tmp_path, share(rank), saving=12) for rank in range(2)]
    agents[1]._snapshots[0].files[shard_name(1)][0] ^= 1
    assert of_shares(agents, tmp_path) == [10, 10]
    # The other node's is intact, and may be about to be written.
    assert [(agent.waited, agent.discarded) for agent in agents] == [([False, True], []), ([False, True], [12])]


def test_a_share_from_before_what_was_committed_since_is_not_used(tmp_path: Path) -> None:
    """The nodes continued without it: it belongs to a line of history that was abandoned."""
    write_checkpoint(tmp_path, 10, TRAINING, attempt=2)
    agents = [Agent(tmp_path, share(rank)) for rank in range(2)]
    assert of_shares(agents, tmp_path) == [10, 10]


def test_what_one_rank_finds_damaged_is_used_by_none(tmp_path: Path) -> None:
    """Each machine has a disk of its own in front; one of them is damaged."""
    tiers = []
    for node in range(2):
        for step in (10, 20):
            write_checkpoint(tmp_path / f"local{node}", step, TRAINING)
        tiers.append(Tiers(LocalStorage(tmp_path / "durable"), LocalStorage(tmp_path / f"local{node}")))
    damage(tmp_path / "local1", 20)
    agents = [Agent(tmp_path) for _ in range(2)]

    def choice(ranks: Ranks) -> int | None:
        return chosen(tiers[ranks.rank], agents[ranks.rank], ranks=ranks)

    assert run_ranks(choice, 2, per_node=1) == [10, 10]
    # Only there: the other one is good.
    assert [(tmp_path / f"local{node}" / "checkpoint-20").is_dir() for node in range(2)] == [True, False]


def test_an_unreachable_tier_is_no_empty_one(tmp_path: Path) -> None:
    tiers = Tiers(LocalStorage(tmp_path / "durable"), LocalStorage(tmp_path / "local"))
    with pytest.raises(StorageUnreachable, match="cannot be reached, and there is no other checkpoint"):
        chosen(tiers, Agent(tmp_path, reachable=False))
    write_checkpoint(tmp_path / "local", 10, TRAINING)
    assert chosen(tiers, Agent(tmp_path, reachable=False)) == 10


def test_own_checkpoints_are_told_from_others(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, TRAINING)
    (tmp_path / "checkpoint-20").mkdir()
    found = own_checkpoint(tmp_path / "checkpoint-10")
    assert found is not None and found[1] == 10 and found[0].location == str(tmp_path)
    assert own_checkpoint(tmp_path / "checkpoint-20") is None and own_checkpoint(tmp_path) is None
    assert read_checkpoint(*found, 0, 1).step == 10
    damage(tmp_path, 10)
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors was altered"):
        read_checkpoint(*found, 0, 1)


def test_only_the_memory_of_the_chosen_snapshot_is_made_ready(tmp_path: Path) -> None:
    """Mapping another one of 18 GB would take a second."""
    ready: list[int] = []
    offered = [
        dataclasses.replace(snapshot(step, TRAINING), prepare=functools.partial(ready.append, step))
        for step in (10, 20)
    ]
    assert chosen(open_tiers(str(tmp_path / "run")), Agent(tmp_path, *offered)) == 20 and ready == [20]
