"""Two nodes that write one checkpoint: the agents' parts of it, over one store in memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from unit.checkpointing.agent.doubles import STATE, Bench, save

from checkpointing.agent.arenas import Arena, ArenaState
from checkpointing.agent.events import CommitFailedEvent, Committed, SnapshotDropped
from checkpointing.agent.protocol import Guest, Refusal
from checkpointing.agent.reporting import Digested, SharesWritten
from checkpointing.agent.resumption import described
from checkpointing.agent.scheduler import SnapshotContent
from checkpointing.commit import sharded_save as together
from checkpointing.commit.catalog import Catalog
from checkpointing.commit.sharded_save import ShardedSave
from checkpointing.commit.tiers import Tiers
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.format.shard_index import INDEX_NAME, shard_name


@pytest.fixture
def nodes() -> tuple[Bench, Bench]:
    """The agent that commits, and another one."""
    leader = Bench()
    return leader, Bench(Tiers(leader.tiers.durable), commits=False)


def share(
    bench: Bench, rank: int, step: int = 7, *, commit: bool = True, attempt: int = 1, receives: bool = False
) -> Arena:
    """Hand over a node's share of a snapshot: a shard, and on the first node a small file."""
    arena = bench.got(step)
    arena.view(0, len(STATE))[:] = STATE
    files = [(shard_name(rank), 0, len(STATE)), (INDEX_NAME, 0, 2)]
    save = ShardedSave(f"ab{step}", (shard_name(0), shard_name(1)))
    info = SnapshotInfo("run", attempt, step, 2, step)
    content = SnapshotContent(info, files, commit, save)
    bench.scheduler.copied(arena.number, step, 0, 1, content, receives=receives)
    return arena


def settle_both(leader: Bench, other: Bench) -> list[list[object]]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda bench: list(bench.settle()), (leader, other)))


def test_each_writes_its_shard_and_one_commits(nodes: tuple[Bench, Bench]) -> None:
    leader, other = nodes
    share(leader, 0)
    share(other, 1)
    of_leader, of_other = settle_both(leader, other)
    assert [type(result) for result in of_leader][-1] is Committed and of_other[-1] == SharesWritten()
    manifest = Catalog(leader.tiers.durable).verify(7)
    assert [file.name for file in manifest.files] == [
        "shards/0.bin",
        "shards/index.json",
        "shards/0.parts.json",
        "shards/begun.json",
        "shards/1.bin",
        "shards/1.parts.json",
    ]
    assert leader.scheduler.outcomes == other.scheduler.outcomes == {7: None}


def test_the_others_write_while_the_one_that_commits_is_busy_with_an_earlier_save(nodes: tuple[Bench, Bench]) -> None:
    """They wait for no longer than half a minute, and an earlier save may take minutes."""
    leader, other = nodes
    share(leader, 0)
    share(other, 1)
    assert list(other.settle())[-1] == SharesWritten()
    assert Catalog(leader.tiers.durable).committed_steps() == []
    leader.settle()
    assert Catalog(leader.tiers.durable).verify(7).step == 7


def test_where_no_thread_can_be_started_a_save_begins_at_its_turn(
    nodes: tuple[Bench, Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("checkpointing.commit.sharded_save.in_background", refused)
    leader, other = nodes
    share(leader, 0)
    share(other, 1)
    settle_both(leader, other)
    assert Catalog(leader.tiers.durable).committed_steps() == [7]


def test_a_node_that_is_gone_fails_the_save_which_is_not_tried_again_but_may_be_resumed_from(
    nodes: tuple[Bench, Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "PATIENCE_S", 0.3)
    leader, _ = nodes
    arena = share(leader, 0)
    failure = leader.settle()[-1]
    assert isinstance(failure, CommitFailedEvent) and "shards/1.bin was not written" in failure.error
    assert Catalog(leader.tiers.durable).committed_steps() == []
    assert not [key for key in leader.store.objects if key.startswith("checkpoint-")]
    leader.scheduler.commit_newest()
    assert not leader.scheduler.is_busy and leader.scheduler.gave_up
    # With the copy that this node may have of the other one's.
    assert leader.resumption.offered() == [arena]
    # No more, if training would end with that very step.
    leader.resumption.discard(7, "it cannot be committed", damaged=False)
    assert arena.state is ArenaState.FREE and leader.events[-1] == SnapshotDropped(
        step=7, reason="it cannot be committed"
    )


def test_a_node_whose_storage_refuses_ends_the_save_of_all(nodes: tuple[Bench, Bench]) -> None:
    leader, other = nodes
    share(other, 1)
    leader.store.refuses = "quota exceeded"
    failure = other.settle()[-1]
    assert isinstance(failure, CommitFailedEvent) and "quota exceeded" in failure.error
    assert "quota exceeded" in (other.scheduler.outcomes[7] or "")


def test_when_the_ranks_have_died_every_node_commits_the_newest(nodes: tuple[Bench, Bench]) -> None:
    leader, other = nodes
    for rank, bench in enumerate(nodes):
        share(bench, rank, commit=False)
        bench.scheduler.commit_newest()
    settle_both(leader, other)
    assert Catalog(leader.tiers.durable).committed_steps() == [7]


def test_ranks_are_offered_shares_at_once_or_are_answered_when_their_save_is_over(nodes: tuple[Bench, Bench]) -> None:
    """If they lack one, they would resume from an older checkpoint, and the newer one would come after it."""
    leader, other = nodes
    shares = []
    for rank, bench in enumerate(nodes):
        # What dead writers have left is removed here, and no later.
        fencer = bench.workers.current.fencer
        fencer.run(fencer.begin(1, ()))
        fencer.current.answered.set()
        shares.append(share(bench, rank, commit=False))
        bench.scheduler.commit_newest()
        held = bench.scheduler.begin_stage()
        # What another node publishes is not this one's to let through.
        assert held == ([(7, 1)] if rank == 0 else [])
        bench.resumption.begin(bench.workers.current.begin_attempt(2, held), fetch=True)
        assert not bench.resumption.is_known(settled=False)
        bench.workers.current.fencer.run(bench.workers.current.fencer.current)
        bench.workers.current._digesting.run_pending()
        bench.workers.current.fencer.current.answered.set()
        assert bench.resumption.is_known(settled=False) and not bench.resumption.is_known(settled=True)
    settle_both(leader, other)
    for arena, bench in zip(shares, nodes, strict=True):
        assert bench.resumption.is_known(settled=True) and bench.resumption.saving == -1
        assert bench.resumption.offered() == [arena]
        assert described(arena)["save"] == "ab7"
    assert Catalog(leader.tiers.durable).committed_steps() == [7]


def test_a_whole_snapshot_of_a_newer_attempt_drops_shares_that_are_ahead(nodes: tuple[Bench, Bench]) -> None:
    """A node that continued alone: its own snapshots count, and are what is committed at the end."""
    leader, _ = nodes
    left = share(leader, 0, 20, commit=False)
    leader.work()
    leader.settle()
    leader.scheduler.begin_stage()
    whole = leader.got(11)
    leader.copied(whole, attempt=2)
    leader.settle()
    assert leader.resumption.offered() == [whole] and left.state is ArenaState.FREE
    leader.scheduler.commit_newest()
    leader.settle()
    assert Catalog(leader.tiers.durable).committed_steps() == [11]


def test_an_abandoned_share_is_not_published_by_a_save_that_still_runs(nodes: tuple[Bench, Bench]) -> None:
    leader, other = nodes
    shares = [share(bench, rank) for rank, bench in enumerate(nodes)]
    for arena in shares:
        arena.is_spent = True
    of_leader, _ = settle_both(leader, other)
    assert type(of_leader[-1]) is CommitFailedEvent and Catalog(leader.tiers.durable).committed_steps() == []


def test_a_share_that_is_saved_is_not_let_through_the_next_fence(nodes: tuple[Bench, Bench]) -> None:
    leader, other = nodes
    share(leader, 0)
    share(other, 1)
    settle_both(leader, other)
    assert leader.scheduler.begin_stage() == [] and len(leader.resumption.offered()) == 1


def test_a_copy_of_another_nodes_shard_is_offered_but_not_written(nodes: tuple[Bench, Bench]) -> None:
    leader, other = nodes
    arena = share(leader, 0, receives=True)
    share(other, 1)
    leader.workers.current._digesting.run_pending()
    assert [name for name, *_ in described(arena)["files"]] == [shard_name(0), INDEX_NAME]
    leader.scheduler.received(arena.number, 7, 0, Guest(shard_name(1), 4096, 9, "digest"))
    settle_both(leader, other)
    assert described(arena)["files"][-1] == (shard_name(1), 4096, 9, "digest")
    names = [file.name for file in Catalog(leader.tiers.durable).verify(7).files]
    assert names.count(shard_name(1)) == 1


def test_a_snapshot_is_kept_until_the_next_one_has_been_copied_to_another_node(nodes: tuple[Bench, Bench]) -> None:
    leader, _ = nodes
    first = share(leader, 0, 6, commit=False, receives=True)
    leader.work()
    leader.scheduler.received(first.number, 6, 0, None)
    second = share(leader, 0, 7, commit=False, receives=True)
    leader.settle()
    assert leader.acquire(8) is Refusal.BUSY
    # Of another step, or of a rank that receives nothing: late messages.
    leader.scheduler.received(second.number, 6, 0, None)
    leader.scheduler.received(second.number, 7, 1, None)
    assert leader.acquire(8) is Refusal.BUSY
    leader.scheduler.received(second.number, 7, 0, None)
    assert leader.acquire(8) is first


def test_what_will_not_be_received_any_more_is_not_waited_for(nodes: tuple[Bench, Bench]) -> None:
    leader, _ = nodes
    arena = share(leader, 0, 6, commit=False, receives=True)
    leader.settle()
    leader.scheduler.drop_unfinished()
    assert not arena.is_in_use and arena.is_usable


def test_a_checkpoint_in_shards_is_not_read_ahead(nodes: tuple[Bench, Bench]) -> None:
    leader, other = nodes
    share(leader, 0)
    share(other, 1)
    settle_both(leader, other)
    fresh = Bench(Tiers(leader.tiers.durable))
    fresh.resumption.begin(fresh.workers.current.begin_attempt(2, ()), fetch=True)
    fresh.settle()
    fresh.resumption.fetch_newest()
    assert fresh.resumption.fetching is None
    # One whose files are whole is.
    save(fresh.tiers.durable, 9, 2)
    fresh.resumption.begin(fresh.workers.current.begin_attempt(3, ()), fetch=True)
    fresh.settle()
    fresh.resumption.fetch_newest()
    assert fresh.resumption.fetching is not None


def test_who_publishes_is_decided_when_the_save_begins(nodes: tuple[Bench, Bench]) -> None:
    """A node that begins to lead while it writes its share does not publish it as well."""
    leader, other = nodes
    share(other, 1)
    other.workers.commits = True
    share(leader, 0)
    _, of_other = settle_both(leader, other)
    assert of_other[-1] == SharesWritten()
    assert Catalog(leader.tiers.durable).verify(7).is_sharded


def test_shares_of_a_line_that_was_abandoned_are_freed(
    nodes: tuple[Bench, Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the older attempt's, of a later step, would be what is committed when the ranks die again."""
    monkeypatch.setattr(together, "PATIENCE_S", 0.3)
    leader, other = nodes
    share(leader, 0, 8)
    leader.settle()
    share(leader, 0, 9, commit=False)
    leader.settle()
    leader.scheduler.begin_stage()
    assert [arena.step for arena in leader.resumption.offered()] == [8, 9]
    monkeypatch.setattr(together, "PATIENCE_S", 30.0)
    for rank, bench in enumerate(nodes):
        newest = share(bench, rank, 6, commit=False, attempt=2)
        bench.work()
        assert bench.resumption.offered() == [newest]
        bench.scheduler.commit_newest()
    settle_both(leader, other)
    assert Catalog(leader.tiers.durable).committed_steps() == [6]


def test_what_becomes_of_an_earlier_attempts_save_is_no_answer_to_the_next_one(
    nodes: tuple[Bench, Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "PATIENCE_S", 0.3)
    leader, _ = nodes
    share(leader, 0)
    leader.scheduler.begin_stage()
    assert isinstance(leader.settle()[-1], CommitFailedEvent) and leader.scheduler.outcomes == {}


def test_an_older_share_is_kept_when_a_newer_one_is_saved(nodes: tuple[Bench, Bench]) -> None:
    """A node has written its own shards while others still write theirs, and copies of them are on their way."""
    leader, other = nodes
    for rank, bench in enumerate(nodes):
        share(bench, rank, 6, commit=False)
        share(bench, rank, 7)
    settle_both(leader, other)
    for bench in nodes:
        assert [arena.step for arena in bench.resumption.offered()] == [6, 7]
        bench.scheduler.commit_newest()
        assert not bench.scheduler.is_busy


def test_the_newest_share_is_never_overwritten(nodes: tuple[Bench, Bench]) -> None:
    """Nodes that are not equally far with their saves would keep different ones."""
    leader, _ = nodes
    first, second = share(leader, 0, 6), share(leader, 0, 7, commit=False)
    # The older one is still being saved.
    first.num_tasks, second.num_tasks = 1, 0
    assert leader.acquire(8) is Refusal.BUSY
    first.num_tasks = 0
    assert leader.acquire(8) is first


def test_a_snapshot_to_be_committed_does_not_wait_for_copies_of_the_one_before(nodes: tuple[Bench, Bench]) -> None:
    leader, _ = nodes
    first, _ = (share(leader, 0, step, commit=False, receives=step == 7) for step in (6, 7))
    leader.settle()
    assert leader.acquire(8) is Refusal.BUSY
    assert leader.acquire(8, urgent=True) is first


def test_what_the_ranks_have_not_resumed_from_is_overwritten_first(nodes: tuple[Bench, Bench]) -> None:
    leader, _ = nodes
    resumed, ahead = share(leader, 0, 8, commit=False), share(leader, 0, 9, commit=False)
    leader.settle()
    leader.scheduler.begin_stage()
    assert [arena.step for arena in leader.resumption.offered()] == [8, 9]
    assert leader.acquire(9) is ahead and resumed.is_usable


def test_what_ranks_need_too_much_of_is_not_offered(nodes: tuple[Bench, Bench]) -> None:
    leader, _ = nodes
    arena = share(leader, 0, 8, commit=False)
    leader.settle()
    assert leader.resumption.offered() == [arena] and arena.share is not None
    arena.save = replace(arena.share, in_memory=False)
    assert leader.resumption.offered() == []


def test_a_share_that_is_being_digested_as_its_attempt_ends_is_not_committed_by_the_next(
    nodes: tuple[Bench, Bench],
) -> None:
    leader, _ = nodes
    old = share(leader, 0, 9, commit=False)
    leader.scheduler.begin_stage()
    leader.scheduler.commit_newest()
    assert [type(result) for result in leader.settle()] == [Digested]
    assert old.state is ArenaState.WHOLE and not leader.scheduler.is_busy and leader.scheduler.outcomes == {}
