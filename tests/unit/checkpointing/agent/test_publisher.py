"""What is published, and what retention removes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from unit.checkpointing.agent.doubles import STATE, Bench, Clock, Reports, Store, save, two_tiers

from checkpointing.agent.events import CommitFailedEvent, Committed, FencedEvent, Pruned, PruneFailed
from checkpointing.agent.fencing import Fencer
from checkpointing.agent.publisher import Publisher
from checkpointing.commit.catalog import Catalog
from checkpointing.commit.kept import keep, unkeep
from checkpointing.commit.reading import pieces_of
from checkpointing.commit.retention import Retention
from checkpointing.commit.tiers import Tiers
from checkpointing.storage import open_storage
from checkpointing.storage.object_storage import ObjectStorage


def publisher_of(tiers: Tiers, reports: Reports, clock: Clock | None = None) -> Publisher:
    fencer = Fencer(tiers, reports, commits=True)
    return Publisher(tiers, fencer, reports, local_retention=Retention(1), clock=clock or Clock())


def test_a_snapshot_becomes_a_checkpoint() -> None:
    bench, clock, reports = Bench(), Clock(), Reports()
    arena = bench.snapshot(5)
    bench.settle()
    arena.whole_since = clock.now - 2.5
    outcome = publisher_of(bench.tiers, reports, clock).commit(arena, bench.tiers.durable)
    assert isinstance(outcome, Committed)
    assert (outcome.step, outcome.tier, outcome.nbytes, outcome.duration_s) == (5, "remote", len(STATE), 2.5)
    assert Catalog(bench.tiers.durable).verify(5).attempt == 1


def test_a_damaged_snapshot_is_not_published() -> None:
    bench = Bench()
    arena = bench.snapshot(5)
    bench.settle()
    arena.damaged = True
    outcome = publisher_of(bench.tiers, Reports()).commit(arena, bench.tiers.durable)
    assert isinstance(outcome, CommitFailedEvent) and "damaged in memory" in outcome.error
    assert Catalog(bench.tiers.durable).committed_steps() == []


def test_an_attempt_that_was_fenced_says_so() -> None:
    bench, reports = Bench(), Reports()
    bench.workers.current.begin_attempt(1, ())
    bench.settle()
    ObjectStorage(bench.store).begin_attempt(2)
    bench.snapshot(5, commit=True)
    results = bench.settle()
    assert [type(result) for result in results if not isinstance(result, tuple)][-2:] == [
        FencedEvent,
        CommitFailedEvent,
    ]
    assert reports == []


def test_nothing_is_removed_before_retention_is_known() -> None:
    tiers = Tiers(ObjectStorage(Store()))
    for step in (1, 2, 3):
        save(tiers.durable, step)
    reports = Reports()
    publisher = publisher_of(tiers, reports)
    publisher.prune(tiers.durable)
    assert reports == [] and Catalog(tiers.durable).committed_steps() == [1, 2, 3]
    publisher.retention = Retention(1)
    publisher.prune(tiers.durable)
    assert reports.results == [Pruned(step=1, tier="remote"), Pruned(step=2, tier="remote")]


def test_what_is_yet_to_be_uploaded_stays(tmp_path: Path) -> None:
    tiers, _ = two_tiers(tmp_path)
    assert tiers.local is not None
    for step in (1, 2, 3):
        save(tiers.local, step)
    reports = Reports()
    publisher_of(tiers, reports).prune(tiers.local, lambda: [2])
    assert reports.results == [Pruned(step=1, tier="local")]
    assert Catalog(tiers.local).committed_steps() == [2, 3]


def test_what_a_user_keeps_stays_in_each_tier(tmp_path: Path) -> None:
    tiers, _ = two_tiers(tmp_path)
    publisher = publisher_of(tiers, Reports())
    publisher.retention = Retention(1)
    for storage in tiers.nearest_first:
        for step in (1, 2, 3, 4):
            save(storage, step)
        keep(storage, storage.read_manifest(2))
        publisher.prune(storage)
        assert Catalog(storage).committed_steps()[0] == 2
        unkeep(storage, 2)
        publisher.prune(storage)
        assert 2 not in Catalog(storage).committed_steps()


def test_what_a_user_keeps_during_the_reading_back_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, reports = open_storage(str(tmp_path)), Reports()
    publisher = publisher_of(Tiers(storage), reports)
    publisher.retention = Retention(1)
    for step in (1, 2, 3, 4):
        save(storage, step)
    refresh, remove = storage.refresh, storage.remove

    def refreshed(step: int) -> None:
        refresh(step)
        keep(storage, storage.read_manifest(1))

    def removed(step: int) -> None:
        remove(step)
        keep(storage, storage.read_manifest(3))

    monkeypatch.setattr(storage, "refresh", refreshed)
    monkeypatch.setattr(storage, "remove", removed)
    publisher.prune(storage)
    assert reports.results == [Pruned(step=2, tier="local")] and storage.steps() == [1, 3, 4]


def test_nothing_is_removed_where_it_is_unknown_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, reports = Store(), Reports()
    tiers = Tiers(ObjectStorage(store))
    publisher = publisher_of(tiers, reports)
    publisher.retention = Retention(1)
    for step in (1, 2, 3):
        save(tiers.durable, step)

    def refuse(prefix: str) -> dict[str, int]:
        raise OSError("access denied")

    monkeypatch.setattr(tiers.durable.sidecars, "sizes", refuse)
    publisher.prune(tiers.durable)
    assert reports.results == [PruneFailed(tier="remote", error="access denied")]
    assert Catalog(tiers.durable).committed_steps() == [1, 2, 3]


def test_a_place_that_refuses_to_remove_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    store, reports = Store(), Reports()
    tiers = Tiers(ObjectStorage(store))
    publisher = publisher_of(tiers, reports)
    publisher.retention = Retention(1)
    store.refuses = "access denied"
    publisher.prune(tiers.durable)
    assert reports.results == [PruneFailed(tier="remote", error="access denied")]


class LockedStore(Store):
    """Refuses to delete some checkpoints, as a bucket with object lock does."""

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.locked, self.asked = set(steps), list[int]()

    def delete(self, keys: Sequence[str]) -> None:
        keys = list(keys)
        step = int(keys[0].split("/")[0].rpartition("-")[2])
        self.asked.append(step)
        if step in self.locked:
            raise PermissionError(13, "object is locked")
        super().delete(keys)


def test_pruning_goes_on_around_what_cannot_be_removed() -> None:
    store, reports = LockedStore(1), Reports()
    tiers = Tiers(ObjectStorage(store))
    publisher = publisher_of(tiers, reports)
    publisher.retention = Retention(1)
    for step in (1, 2, 3):
        save(tiers.durable, step)
    publisher.prune(tiers.durable)
    (failed, pruned) = reports.results
    assert isinstance(failed, PruneFailed) and pruned == Pruned(step=2, tier="remote")
    assert (failed.steps, failed.held_bytes, failed.error) == ([1], len(STATE), "object is locked")
    # It is said once; what is new is.
    reports.clear()
    store.locked.add(3)
    for step in (4, 5):
        save(tiers.durable, step)
    publisher.prune(tiers.durable)
    assert [(one.steps if isinstance(one, PruneFailed) else one.step) for one in reports.results] == [[1, 3], 4]  # type: ignore[union-attr]
    # It is tried again, after the others.
    reports.clear()
    store.locked.clear()
    publisher.prune(tiers.durable)
    assert [one.step for one in reports.results] == [1, 3]  # type: ignore[union-attr]


def test_a_place_that_refuses_everything_is_not_asked_for_each() -> None:
    store = LockedStore(*range(1, 20))
    tiers = Tiers(ObjectStorage(store))
    publisher = publisher_of(tiers, Reports())
    publisher.retention = Retention(1)
    for step in range(1, 20):
        save(tiers.durable, step)
    publisher.prune(tiers.durable)
    assert len(set(store.asked)) == 3
    # The next time, others are tried first.
    store.locked = {1, 2, 3}
    publisher.prune(tiers.durable)
    assert tiers.catalog.committed_steps() == [1, 2, 3, 19]


class Lying:
    """A run on a disk that holds other bytes of some checkpoints than it says."""

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.storage = open_storage(str(folder))
        self.reports = Reports()
        self.publisher = publisher_of(Tiers(self.storage), self.reports)
        self.publisher.retention = Retention(keep_last)
        self.read: list[int] = []
        refresh = self.storage.refresh

        def refreshed(step: int) -> None:
            self.read.append(step)
            refresh(step)

        self.storage.refresh = refreshed  # type: ignore[method-assign]

    def commit(self, step: int, *, lies: bool = False) -> list[int]:
        save(self.storage, step)
        if lies:
            directory = self.storage.directory(step)
            assert directory is not None
            (directory / "file").write_bytes(STATE[::-1])
        self.publisher.prune(self.storage)
        return self.storage.steps()


def test_nothing_is_removed_for_what_a_disk_has_not_written(tmp_path: Path) -> None:
    run = Lying(tmp_path, keep_last=1)
    assert run.commit(5) == [5] and run.read == []
    assert run.commit(10) == [10] and run.read == [10]
    assert run.commit(15, lies=True) == [10, 15]
    (failed,) = [one for one in run.reports.results if isinstance(one, PruneFailed)]
    assert "checkpoint-15" in failed.error and "digest" in failed.error
    # Once another one is whole, the others go.
    assert run.commit(20) == [20]


def test_one_of_those_that_stay_is_read_back(tmp_path: Path) -> None:
    run = Lying(tmp_path, keep_last=3)
    for step in range(1, 10):
        run.commit(step)
    assert run.storage.steps() == [7, 8, 9]
    # Each as long as the one before stays.
    assert run.read == [4, 7]
    assert run.commit(10, lies=True) == [7, 8, 9, 10] and run.read[-1] == 10


def test_a_run_that_is_asked_to_stop_does_not_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpointing.agent.publisher._SOON_READ_BYTES", 4)
    run = Lying(tmp_path, keep_last=1)
    run.commit(5)
    run.publisher.is_hurried = True
    assert run.commit(10) == [5, 10] and run.read == []
    run.publisher.is_hurried = False
    assert run.commit(15) == [15]


def test_a_store_that_compares_checksums_is_not_read_back() -> None:
    bench = Bench()
    assert bench.tiers.durable.checks_arrival


@pytest.mark.parametrize("waits", ["commit", "stop"])
def test_reading_back_is_given_up_for_what_cannot_wait(
    waits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpointing.agent.publisher._SOON_READ_BYTES", 4)
    run = Lying(tmp_path, keep_last=1)
    run.commit(5)

    def arriving(*arguments: Any) -> Iterator[memoryview]:
        for piece in pieces_of(*arguments):
            # It comes while the first piece is read.
            run.publisher.is_hurried, run.publisher.has_work = waits == "stop", lambda: waits == "commit"
            yield piece

    monkeypatch.setattr("checkpointing.agent.publisher.pieces_of", arriving)
    assert run.commit(10) == [5, 10] and run.commit(15) == [5, 10, 15]
    # Commits may come so quickly that there is never time.
    assert run.commit(20) == ([20] if waits == "commit" else [5, 10, 15, 20])
