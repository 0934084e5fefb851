"""What an attempt may resume from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from unit.checkpointing.agent.doubles import STATE, Bench, save

from checkpointing.agent.arenas import ArenaState
from checkpointing.agent.events import Fetched, FetchFailed, SnapshotDamaged
from checkpointing.agent.resumption import described
from checkpointing.commit.tiers import Tiers, TrainingStage
from checkpointing.format.digest import digest_buffer
from checkpointing.storage import open_storage


@pytest.fixture
def bench() -> Bench:
    return Bench()


def begin(bench: Bench, attempt: int = 2, *, fetch: bool = True) -> None:
    held = bench.scheduler.begin_stage()
    bench.resumption.begin(bench.workers.current.begin_attempt(attempt, held), fetch=fetch)


def test_nothing_is_known_before_older_attempts_are_fenced(bench: Bench) -> None:
    assert not bench.resumption.is_known(settled=True)
    begin(bench)
    assert not bench.resumption.is_known(settled=True)
    bench.work()
    assert bench.resumption.is_known(settled=True) and bench.resumption.refusal() is None


def test_snapshots_are_offered_once_they_have_digests(bench: Bench) -> None:
    begin(bench)
    bench.settle()
    arena = bench.snapshot(7)
    assert not bench.resumption.is_known(settled=True)
    bench.work()
    assert bench.resumption.is_known(settled=True) and bench.resumption.offered() == [arena]
    offer = described(arena)
    assert (offer["step"], offer["arena"]) == (7, arena.number)
    assert offer["files"] == [("file", 0, len(STATE), digest_buffer(STATE))]


def test_of_a_step_that_was_saved_after_its_snapshot_each_node_offers_the_first_and_keeps_the_second(
    bench: Bench,
) -> None:
    first = bench.snapshot(7)
    bench.settle()
    second = bench.snapshot(7, commit=True)
    assert second is not first and second.whole_since > first.whole_since
    bench.settle()
    assert bench.resumption.offered() == [first]
    # It is the one with the metrics, and the next snapshot overwrites the other.
    assert bench.pool.newest(bench.workers.stage.name) is second
    assert bench.snapshot(8) is first


def test_of_two_attempts_the_newer_ones_snapshot_of_a_step_is_offered(bench: Bench) -> None:
    """A node was cut off, and the others have computed that step again: its line was abandoned."""
    bench.snapshot(7)
    again = bench.snapshot(7)
    assert again.info is not None
    again.info = dataclasses.replace(again.info, attempt=again.info.attempt + 1)
    bench.settle()
    assert bench.resumption.offered() == [again]


def test_a_snapshot_that_was_found_damaged_is_not_offered_again(bench: Bench) -> None:
    arena = bench.snapshot(7)
    bench.settle()
    bench.resumption.discard(7, "it differs", damaged=True)
    bench.resumption.discard(7, "it differs", damaged=True)
    assert bench.events[1:] == [SnapshotDamaged(step=7, reason="it differs")]
    assert (bench.resumption.offered(), arena.state) == ([], ArenaState.FREE)
    bench.scheduler.commit_newest()
    assert not bench.scheduler.is_busy


def test_a_damaged_snapshot_is_freed_when_the_last_task_has_ended(bench: Bench) -> None:
    arena = bench.snapshot(7, commit=True)
    bench.resumption.discard(7, "it differs", damaged=True)
    assert bench.scheduler.whole() == [arena]
    bench.settle()
    assert bench.scheduler.whole() == []
    assert "damaged" in (bench.scheduler.outcomes[7] or "")


def test_snapshots_of_another_stage_are_not_offered(bench: Bench) -> None:
    bench.snapshot(7)
    bench.settle()
    bench.workers.stage = TrainingStage("stage-2", 2, 10)
    assert bench.resumption.offered() == []


def test_the_newest_checkpoint_is_read_before_ranks_ask(bench: Bench) -> None:
    save(bench.tiers.durable, 5)
    begin(bench)
    bench.settle()
    bench.resumption.fetch_newest()
    fetching = bench.resumption.fetching
    assert fetching is not None and not bench.resumption.is_known(settled=True)
    assert [type(result) for result in bench.settle()] == [Fetched]
    assert bench.resumption.is_known(settled=True) and bench.resumption.offered() == [fetching]
    assert bytes(fetching.view(0, len(STATE))) == STATE
    # It is committed: the end of the attempt has nothing to do.
    bench.scheduler.commit_newest()
    assert not bench.scheduler.is_busy


def test_a_checkpoint_that_cannot_be_read_is_left_to_the_ranks(bench: Bench) -> None:
    save(bench.tiers.durable, 5)
    begin(bench)
    bench.settle()
    [name] = [key for key in bench.store.objects if key.endswith("/file")]
    bench.store.objects[name] = b"other"
    bench.resumption.fetch_newest()
    [failure] = bench.settle()
    assert isinstance(failure, FetchFailed) and "was altered" in failure.error
    assert bench.resumption.is_known(settled=True) and bench.resumption.offered() == []


@pytest.mark.parametrize("held", [5, 6])
def test_nothing_is_read_that_is_held_in_memory(bench: Bench, held: int) -> None:
    save(bench.tiers.durable, 5)
    bench.snapshot(held)
    begin(bench)
    bench.settle()
    bench.resumption.fetch_newest()
    assert bench.resumption.fetching is None


def test_a_checkpoint_that_is_newer_than_what_is_held_is_read(bench: Bench) -> None:
    save(bench.tiers.durable, 5)
    bench.snapshot(4)
    begin(bench)
    bench.settle()
    bench.resumption.fetch_newest()
    assert bench.resumption.fetching is not None


def test_nothing_is_read_where_ranks_resume_from_another_step(bench: Bench) -> None:
    save(bench.tiers.durable, 5)
    begin(bench, fetch=False)
    bench.settle()
    bench.resumption.fetch_newest()
    assert bench.resumption.fetching is None


def test_what_is_in_a_directory_is_not_read_ahead(tmp_path: Path) -> None:
    bench = Bench(Tiers(open_storage(str(tmp_path))))
    save(bench.tiers.durable, 5)
    begin(bench)
    bench.settle()
    bench.resumption.fetch_newest()
    assert bench.resumption.fetching is None


def test_ranks_are_answered_why_an_attempt_cannot_begin(bench: Bench) -> None:
    begin(bench)
    bench.store.refuses = "no route to host"
    bench.work()
    assert bench.resumption.refusal() == {"storage_error": "memory://here: no route to host"}
    bench.store.refuses = None
    other = Tiers(bench.tiers.durable).durable
    other.begin_attempt(9)
    begin(bench, 3)
    bench.work()
    refusal = bench.resumption.refusal()
    assert refusal is not None and "attempt 9 of this run has begun" in refusal["error"]
