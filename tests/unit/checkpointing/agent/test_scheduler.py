"""Which snapshot gets which arena, and which snapshots are committed."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from unit.checkpointing.agent.doubles import Bench

from checkpointing.agent.arenas import Arena, ArenaState
from checkpointing.agent.events import SnapshotDropped, SnapshotSkipped, SnapshotTaken
from checkpointing.agent.protocol import Refusal
from checkpointing.agent.scheduler import ArenaRequest
from checkpointing.commit.catalog import Catalog
from checkpointing.commit.tiers import TrainingStage


@pytest.fixture
def bench() -> Bench:
    return Bench()


def committed(bench: Bench) -> list[int]:
    return Catalog(bench.tiers.durable).committed_steps()


def test_the_leader_decides_and_its_peers_get_the_same(bench: Bench) -> None:
    request = ArenaRequest(5, 1, 100, wait=False)
    assert bench.scheduler.acquire(request, is_leader=False) is None
    arena = bench.scheduler.acquire(request, is_leader=True)
    assert isinstance(arena, Arena) and (arena.step, arena.state) == (5, ArenaState.FILLING)
    assert bench.scheduler.acquire(request, is_leader=False) is arena
    # The same step, asked for again: another request.
    assert bench.scheduler.acquire(ArenaRequest(5, 2, 100, wait=False), is_leader=False) is None


def test_a_snapshot_is_skipped_while_all_arenas_are_in_use(bench: Bench) -> None:
    for step in (1, 2):
        bench.got(step)
    assert bench.acquire(3, wait=True) is None
    assert bench.events == []
    assert bench.acquire(3) is Refusal.BUSY
    assert bench.events == [SnapshotSkipped(step=3, reason="all arenas are being written, or copied to another node")]


def test_without_memory_there_is_no_arena_and_no_waiting() -> None:
    bench = Bench(memory_limit=0)
    assert bench.acquire(1, wait=True) is Refusal.NO_MEMORY
    assert bench.events == []


def test_the_newest_whole_snapshot_is_kept_while_the_next_is_made(bench: Bench) -> None:
    first, second = bench.snapshot(1), bench.snapshot(2)
    bench.settle()
    assert bench.got(3) is first
    # The other one holds the only whole snapshot.
    assert bench.acquire(4) is Refusal.BUSY
    assert second.is_usable


def test_a_snapshot_is_whole_when_every_rank_has_copied(bench: Bench) -> None:
    arena = bench.got(1)
    bench.copied(arena, num_ranks=2)
    assert not arena.is_usable
    bench.scheduler.copied(arena.number, 1, 1, 2, None)
    assert arena.is_usable
    assert bench.events == [SnapshotTaken(step=1, to_be_committed=False)]


@pytest.mark.parametrize(("number", "step"), [(7, 1), (0, 2)])
def test_a_message_about_another_snapshot_is_ignored(bench: Bench, number: int, step: int) -> None:
    arena = bench.got(1)
    assert arena.number == 0
    bench.scheduler.copied(number, step, 0, 1, None)
    bench.scheduler.abandon(number, step, "torn")
    assert (arena.state, bench.events) == (ArenaState.FILLING, [])


def test_what_a_rank_abandons_or_leaves_unfinished_is_dropped(bench: Bench) -> None:
    arena = bench.got(1)
    bench.scheduler.abandon(arena.number, 1, "the optimizer stepped")
    bench.got(2)
    bench.snapshot(3)
    bench.scheduler.drop_unfinished()
    dropped = [event for event in bench.events if isinstance(event, SnapshotDropped)]
    assert dropped == [
        SnapshotDropped(step=1, reason="the optimizer stepped"),
        SnapshotDropped(step=2, reason="a rank ended in mid-copy"),
    ]
    assert [arena.step for arena in bench.scheduler.whole()] == [3]


def test_a_snapshot_is_committed_where_that_was_asked_for(bench: Bench) -> None:
    bench.snapshot(1, commit=True)
    bench.snapshot(2)
    assert bench.scheduler.is_busy
    bench.settle()
    assert (bench.scheduler.outcomes, committed(bench)) == ({1: None}, [1])
    assert not bench.scheduler.is_busy


def test_the_end_of_an_attempt_commits_the_newest_snapshot_once(bench: Bench) -> None:
    bench.snapshot(1)
    bench.snapshot(2)
    for _ in range(2):
        bench.scheduler.commit_newest()
        assert sum(arena.num_tasks for arena in bench.pool.arenas) <= 3
        bench.settle()
    assert committed(bench) == [2]


@pytest.mark.parametrize(("save", "steps"), [(None, [2]), (Mock(), [])])
def test_while_ranks_go_on_only_what_one_node_writes_is_committed(bench: Bench, save: Any, steps: list[int]) -> None:
    bench.snapshot(1)
    bench.snapshot(2).save = save
    for _ in range(2):
        bench.scheduler.commit_newest(ranks_go_on=True)
        bench.settle()
    assert committed(bench) == steps


def test_a_commit_that_failed_is_tried_again_at_the_end_of_the_attempt(bench: Bench) -> None:
    bench.store.refuses = "no space"
    arena = bench.snapshot(1, commit=True)
    bench.settle()
    assert "no space" in (bench.scheduler.outcomes[1] or "")
    assert not arena.commit_wanted and not bench.scheduler.gave_up
    bench.store.refuses = None
    bench.scheduler.commit_newest()
    bench.settle()
    assert (bench.scheduler.outcomes, committed(bench)) == ({1: None}, [1])


def test_the_last_commit_that_fails_is_given_up(bench: Bench) -> None:
    bench.store.refuses = "no space"
    bench.snapshot(1)
    bench.settle()
    bench.scheduler.is_ending = True
    for _ in range(3):
        bench.scheduler.commit_newest()
        bench.settle()
    assert bench.scheduler.gave_up
    assert not bench.scheduler.is_busy


def test_on_a_node_that_does_not_write_a_commit_is_over_at_once() -> None:
    bench = Bench(commits=False)
    bench.snapshot(1, commit=True)
    assert bench.scheduler.outcomes == {1: None}
    bench.settle()
    assert committed(bench) == []


def test_snapshots_of_an_earlier_stage_are_neither_offered_nor_answered(bench: Bench) -> None:
    bench.snapshot(1, commit=True)
    bench.work()
    bench.workers.stage = TrainingStage("stage-2", 2, 10)
    assert bench.scheduler.begin_stage() == []
    for result, arena in list(bench._results):
        if arena is not None:
            bench.scheduler.take_result(result, arena)
    assert bench.scheduler.outcomes == {} and bench.scheduler.whole() == []


def test_snapshots_that_are_held_are_known_to_the_next_attempt(bench: Bench) -> None:
    bench.snapshot(1)
    bench.snapshot(2)
    assert sorted(bench.scheduler.begin_stage()) == [(1, 1), (2, 1)]
