"""What the durable tier gets, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.checkpointing.agent.doubles import STATE, Bench, Reports, Store, save, two_tiers

from checkpointing.agent.events import CheckpointQuarantined, CommitFailedEvent, Committed
from checkpointing.agent.fencing import Fencer
from checkpointing.agent.publisher import Publisher
from checkpointing.agent.reporting import UploadEnded
from checkpointing.agent.uploader import Uploader
from checkpointing.commit.catalog import Catalog
from checkpointing.commit.kept import keep
from checkpointing.commit.retention import Retention
from checkpointing.commit.tiers import Tiers
from checkpointing.storage import Storage


class Uploads:
    def __init__(self, folder: Path) -> None:
        self.tiers, self.store = two_tiers(folder)
        self.reports = Reports()
        fencer = Fencer(self.tiers, self.reports, commits=True)
        self.publisher = Publisher(self.tiers, fencer, self.reports, local_retention=Retention(2))
        self.publisher.retention = Retention(2, keep_every=10)
        self.uploader = Uploader(self.tiers, self.publisher, self.reports)
        assert self.tiers.local is not None
        self.local: Storage = self.tiers.local

    def look(self) -> list[object]:
        """What is reported of the tasks that wait."""
        self.reports.clear()
        self.uploader.look()
        self.uploader.thread.run_pending()
        assert not self.uploader.is_busy and self.reports.results[-1] == UploadEnded()
        return list(self.reports.results[:-1])

    @property
    def committed(self) -> list[int]:
        return Catalog(self.tiers.durable).committed_steps()


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    return Uploads(tmp_path)


def test_the_newest_is_uploaded_first_then_what_is_kept_for_good(uploads: Uploads) -> None:
    for step in (5, 10, 15, 20, 25):
        save(uploads.local, step)
    uploaded = [result for result in uploads.look() if isinstance(result, Committed)]
    assert [(event.step, event.tier, event.nbytes) for event in uploaded] == [
        (step, "remote", len(STATE)) for step in (25, 20, 10)
    ]
    # What lies between is passed over, and nothing is uploaded twice.
    assert uploads.committed == [10, 20, 25] and uploads.look() == []


def test_what_a_user_keeps_is_uploaded_too(uploads: Uploads) -> None:
    for step in (4, 5, 6):
        save(uploads.local, step)
    keep(uploads.local, uploads.local.read_manifest(4))
    uploads.local.sidecars.write("keep-99.json", b"")
    uploads.look()
    assert uploads.committed == [4, 6]


def test_what_is_at_the_durable_tier_already_is_found_there(uploads: Uploads) -> None:
    save(uploads.local, 10)
    save(uploads.tiers.durable, 10)
    assert uploads.look() == []


def test_a_look_that_waits_is_enough(uploads: Uploads) -> None:
    save(uploads.local, 10)
    for _ in range(3):
        uploads.uploader.look()
    uploads.uploader.thread.run_pending()
    assert uploads.reports.results.count(UploadEnded()) == 1


@pytest.mark.parametrize(("commits", "local"), [(False, True), (True, False)])
def test_without_a_local_tier_or_on_another_node_nothing_is_due(commits: bool, local: bool, tmp_path: Path) -> None:
    tiers, _ = two_tiers(tmp_path)
    tiers = tiers if local else Tiers(tiers.durable)
    fencer, reports = Fencer(tiers, Reports(), commits=commits), Reports()
    publisher = Publisher(tiers, fencer, reports, local_retention=Retention(2))
    uploader = Uploader(tiers, publisher, reports)
    uploader.look()
    assert not uploader.is_busy


def test_a_tier_that_refuses_is_asked_again_with_the_next_look(uploads: Uploads) -> None:
    save(uploads.local, 10)
    uploads.store.refuses = "no space"
    assert uploads.look() == [CommitFailedEvent(step=10, tier="remote", error="no space")]
    uploads.store.refuses = None
    assert isinstance(uploads.look()[0], Committed)
    assert uploads.committed == [10]


def test_after_a_failure_the_durable_tier_is_listed_again(uploads: Uploads) -> None:
    """The upload may have arrived, and its answer been lost."""
    save(uploads.local, 10)
    uploads.look()
    save(uploads.local, 20)
    uploads.store.refuses = "no answer"
    assert isinstance(uploads.look()[0], CommitFailedEvent)
    uploads.store.refuses = None
    save(uploads.tiers.durable, 20)
    assert uploads.look() == []


def test_a_checkpoint_that_was_altered_is_quarantined_and_the_one_before_is_uploaded(uploads: Uploads) -> None:
    for step in (5, 7):
        save(uploads.local, step)
    folder = uploads.local.directory(7)
    assert folder is not None
    (folder / "file").write_bytes(b"other")
    quarantined, failed = uploads.look()
    assert isinstance(quarantined, CheckpointQuarantined) and quarantined.kept_as.endswith("checkpoint-7.invalid")
    assert isinstance(failed, CommitFailedEvent) and "file was altered" in failed.error
    assert [type(result) for result in uploads.look()] == [Committed]
    assert uploads.committed == [5]


def test_a_damaged_snapshot_goes_to_no_tier(tmp_path: Path) -> None:
    tiers, _ = two_tiers(tmp_path)
    bench = Bench(tiers)
    bench.workers.current.begin_attempt(1, ())
    bench.settle()
    arena = bench.snapshot(5, commit=True)
    arena.damaged = True
    failures = [result for result in bench.settle() if isinstance(result, CommitFailedEvent)]
    assert [failure.tier for failure in failures] == ["local"] and arena.num_tasks == 0


def test_a_snapshot_that_the_local_tier_refuses_goes_to_the_durable_one(tmp_path: Path) -> None:
    tiers, _ = two_tiers(tmp_path)
    bench = Bench(tiers)
    bench.workers.current.begin_attempt(1, ())
    bench.settle()
    local = tmp_path / "local"
    local.rename(tmp_path / "gone")
    local.touch()
    arena = bench.snapshot(5, commit=True)
    bench.work()
    results = [result for result in bench.settle() if isinstance(result, Committed | CommitFailedEvent)]
    assert [(type(result), result.tier) for result in results] == [(CommitFailedEvent, "local"), (Committed, "remote")]
    assert arena.num_tasks == 0 and bench.scheduler.outcomes == {5: None}
    assert isinstance(bench.store, Store)
    assert Catalog(tiers.durable).committed_steps() == [5]
