"""Two nodes that hold the same snapshot, and both write it: the agents' parts of it, over one store in memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from unit.checkpointing.agent.doubles import STATE, Bench, two_tiers

from checkpointing.agent.arenas import Arena, ArenaState
from checkpointing.agent.events import CommitFailedEvent, Committed
from checkpointing.agent.reporting import Digested, PortionEnded, Result
from checkpointing.agent.scheduler import SnapshotContent
from checkpointing.commit import replicated_save as split
from checkpointing.commit.catalog import Catalog
from checkpointing.commit.replicated_save import ReplicatedSave
from checkpointing.commit.tiers import Tiers
from checkpointing.format.manifest import SnapshotInfo


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "LEAST_BYTES", 1)
    monkeypatch.setattr(split, "PATIENCE_S", 0.2)
    monkeypatch.setattr(split, "BEGIN_PATIENCE_S", 0.2)


@pytest.fixture
def nodes() -> tuple[Bench, Bench]:
    """The agent that commits, and another one."""
    leader = Bench()
    return leader, Bench(Tiers(leader.tiers.durable), commits=False)


def snapshot(bench: Bench, node: int, step: int = 7, *, commit: bool = True) -> Arena:
    """A node's ranks have copied a snapshot; its only part is the second node's to write."""
    arena = bench.got(step)
    arena.view(0, len(STATE))[:] = STATE
    info = SnapshotInfo("run", 1, step, 2, step)
    save = ReplicatedSave(f"ab{step}", node, 2, ("file",)) if commit else None
    content = SnapshotContent(info, [("file", 0, len(STATE))], commit, save)
    bench.scheduler.copied(arena.number, step, 0, 1, content)
    return arena


def settle(*benches: Bench) -> list[list[Result]]:
    with ThreadPoolExecutor(len(benches)) as pool:
        return list(pool.map(lambda bench: bench.settle(), benches))


def committed(results: list[Result]) -> Committed:
    return next(result for result in results if isinstance(result, Committed))


def test_both_write_and_both_keep_their_snapshot(nodes: tuple[Bench, Bench]) -> None:
    leader, other = nodes
    arenas = [snapshot(bench, number) for number, bench in enumerate(nodes)]
    # Its ranks do not wait for what another node commits.
    assert other.scheduler.outcomes == {7: None} and leader.scheduler.outcomes == {}
    of_leader, of_other = settle(leader, other)
    event = committed(of_leader)
    assert (event.nodes, event.alone) == (2, None)
    assert of_other == [Digested(), PortionEnded()]
    assert leader.scheduler.outcomes == {7: None}
    assert [arena.state for arena in arenas] == [ArenaState.WHOLE] * 2
    assert [arena.num_tasks for arena in arenas] == [0, 0]
    Catalog(leader.tiers.durable).verify(7)


def test_without_the_other_node_it_is_written_all_the_same(nodes: tuple[Bench, Bench]) -> None:
    leader, _ = nodes
    snapshot(leader, 0)
    event = committed(leader.settle())
    assert event.nodes is None and "has not written its part" in (event.alone or "")
    Catalog(leader.tiers.durable).verify(7)


def test_nodes_that_do_not_meet_try_it_twice_in_an_attempt(
    nodes: tuple[Bench, Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that each has for itself: nobody waits at every save."""
    leader, other = nodes
    elsewhere = Bench(commits=False)
    for step in (5, 6):
        snapshot(leader, 0, step)
        snapshot(elsewhere, 1, step)
        settle(leader, elsewhere)
    monkeypatch.setattr(split, "PATIENCE_S", 1e9)
    monkeypatch.setattr(split, "BEGIN_PATIENCE_S", 1e9)
    snapshot(leader, 0, 8)
    snapshot(elsewhere, 1, 8)
    (of_leader, of_other) = settle(leader, elsewhere)
    event = committed(of_leader)
    assert (event.step, event.nodes, event.alone) == (8, None, None)
    assert of_other == [Digested(), PortionEnded()]
    # Another node, which could take part, learns that there is nothing to write.
    snapshot(other, 1, 8)
    assert other.settle() == [Digested(), PortionEnded()]


def test_what_is_tried_again_is_written_by_one_node(nodes: tuple[Bench, Bench]) -> None:
    leader, _ = nodes
    leader.store.refuses = "quota exceeded"
    snapshot(leader, 0)
    assert any(isinstance(result, CommitFailedEvent) for result in leader.settle())
    leader.store.refuses = None
    leader.scheduler.commit_newest()
    event = committed(leader.settle())
    assert (event.nodes, event.alone) == (None, None)


def test_a_node_whose_storage_refuses_goes_on(nodes: tuple[Bench, Bench]) -> None:
    _, other = nodes
    arena = snapshot(other, 1)
    other.store.refuses = "quota exceeded"
    elsewhere: Any = other.tiers.durable.store
    elsewhere.refuses = "quota exceeded"
    assert other.settle() == [Digested(), PortionEnded()]
    assert arena.state is ArenaState.WHOLE and other.scheduler.outcomes == {7: None}
    assert not other.scheduler.gave_up


def test_a_node_that_takes_over_does_not_write_for_the_leader_before(
    nodes: tuple[Bench, Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own first commit would wait for a save that nobody begins."""
    monkeypatch.setattr(split, "BEGIN_PATIENCE_S", 1e9)
    _, other = nodes
    snapshot(other, 1)
    other.workers.commits = True
    assert other.settle() == [Digested(), PortionEnded()]


def test_what_ranks_left_is_committed_by_one_node(nodes: tuple[Bench, Bench]) -> None:
    """Nobody has agreed on a save."""
    for number, bench in enumerate(nodes):
        snapshot(bench, number, commit=False)
        bench.scheduler.commit_newest()
    of_leader, of_other = settle(*nodes)
    assert committed(of_leader).nodes is None and of_other == [Digested()]


def test_a_local_tier_is_one_nodes_own(tmp_path: Path) -> None:
    tiers, _ = two_tiers(tmp_path)
    leader = Bench(tiers)
    snapshot(leader, 0)
    assert committed(leader.settle()).alone is None
    other = Bench(Tiers(tiers.durable, tiers.local), commits=False)
    snapshot(other, 1)
    assert other.settle() == [Digested(), PortionEnded()]
