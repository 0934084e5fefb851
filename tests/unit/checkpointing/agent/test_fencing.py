"""How attempts begin at their storage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from unit.checkpointing.agent.doubles import Reports, Store, save, two_tiers

from checkpointing.agent.events import FencedEvent, TierUnreachable
from checkpointing.agent.fencing import Fencer, Fencing
from checkpointing.commit.tiers import Tiers
from checkpointing.errors import Fenced
from checkpointing.storage.object_storage import ObjectStorage


def begun(fencer: Fencer, attempt: int, held: frozenset[tuple[int, int]] = frozenset()) -> Fencing:
    fencing = fencer.begin(attempt, held)
    fencer.run(fencing)
    return fencing


def test_older_attempts_are_fenced_and_the_newest_checkpoint_is_found() -> None:
    store, reports = Store(), Reports()
    storage = ObjectStorage(store)
    storage.begin_attempt(1)
    save(storage, 5)
    fencing = begun(Fencer(Tiers(ObjectStorage(store)), reports, commits=True), 2)
    assert (fencing.error, fencing.durable_begun) == (None, True)
    assert fencing.newest is not None and fencing.newest.step == 5
    assert storage.fence().attempt == 2 and reports == []
    with pytest.raises(Fenced):
        storage.check_fence(6, 1)


def test_what_is_held_of_an_older_attempt_may_still_be_published() -> None:
    store = Store()
    storage = ObjectStorage(store)
    storage.begin_attempt(1)
    begun(Fencer(Tiers(ObjectStorage(store)), Reports(), commits=True), 2, frozenset({(6, 1)}))
    storage.check_fence(6, 1)


def test_an_attempt_that_comes_too_late_is_fenced() -> None:
    store, reports = Store(), Reports()
    ObjectStorage(store).begin_attempt(3)
    fencing = begun(Fencer(Tiers(ObjectStorage(store)), reports, commits=True), 2)
    assert fencing.fenced and "attempt 3 of this run has begun" in (fencing.error or "")
    assert [type(result) for result in reports.results] == [FencedEvent]


def test_a_node_that_does_not_write_only_looks() -> None:
    store = Store()
    save(ObjectStorage(store), 5)
    fencer = Fencer(Tiers(ObjectStorage(store)), Reports(), commits=False)
    fencing = begun(fencer, 2)
    assert fencing.newest is not None and ObjectStorage(store).fence().attempt == 0
    fencer.begin_at_durable_tier()
    assert ObjectStorage(store).fence().attempt == 0


def test_an_attempt_that_was_overtaken_is_left_alone() -> None:
    store = Store()
    fencer = Fencer(Tiers(ObjectStorage(store)), Reports(), commits=True)
    overtaken = fencer.begin(1, ())
    fencer.begin(2, ())
    fencer.run(overtaken)
    assert ObjectStorage(store).fence().attempt == 0


def test_what_dead_writers_left_is_removed_once(tmp_path: Path) -> None:
    tiers, _ = two_tiers(tmp_path)
    assert tiers.local is not None
    fencer = Fencer(tiers, Reports(), commits=True)
    left = tmp_path / "local" / ".checkpoint-5.1.tmp"
    left.mkdir(parents=True)
    begun(fencer, 2)
    assert not left.exists()
    # From now on this process itself may be writing.
    left.mkdir()
    begun(fencer, 3)
    assert left.exists()


def test_what_dead_writers_left_at_the_durable_tier_is_removed_too(tmp_path: Path) -> None:
    tiers, store = two_tiers(tmp_path)
    store.put("checkpoint-5/1.abcdef/file", b"half")
    begun(Fencer(tiers, Reports(), commits=True), 2)
    assert store.sizes("checkpoint-5/") == {}


@pytest.mark.parametrize("answers", [True, False])
def test_with_a_local_tier_an_attempt_begins_without_the_durable_one(answers: bool, tmp_path: Path) -> None:
    tiers, store = two_tiers(tmp_path)
    assert tiers.local is not None
    save(tiers.local, 5)
    reports, release = Reports(), threading.Event()
    get: Callable[[str], bytes | None] = store.get
    store.refuses = "no route to host" if answers else None
    if not answers:
        store.sizes = lambda folder="": (release.wait(60), {})[1]  # type: ignore[method-assign]
    fencer = Fencer(tiers, reports, commits=True, patience_s=60.0 if answers else 0.01)
    fencing = begun(fencer, 2)
    reason = "no route to host" if answers else "no answer yet"
    assert fencing.unreachable == reason and fencing.newest is not None and not fencing.durable_begun
    assert reports.results == [TierUnreachable(tier="remote", reason=reason)]
    # Before anything is published there, it is made up for.
    release.set()
    store.refuses = None
    fencer.begin_at_durable_tier()
    assert fencing.durable_begun and get is not None


def test_a_commit_waits_for_the_attempt_that_is_the_newest_then() -> None:
    fencer = Fencer(Tiers(ObjectStorage(Store())), Reports(), commits=True)
    fencer.wait_until_answered()
    first = fencer.begin(1, ())
    waiter = threading.Thread(target=fencer.wait_until_answered)
    waiter.start()
    second = fencer.begin(2, ())
    first.answered.set()
    waiter.join(0.05)
    assert waiter.is_alive()
    second.answered.set()
    waiter.join(60)
    assert not waiter.is_alive()
