"""Two directories stand for the two tiers; what happens over a network is in tests/integration/test_tiers.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointing.agent.writer import Writer
from checkpointing.commit.protocol import StagedFile, commit_snapshot
from checkpointing.commit.retention import Retention
from checkpointing.commit.tiers import Tiers, open_tiers
from checkpointing.errors import Fenced, InvalidCheckpoint
from checkpointing.format.digest import digest_buffer
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.storage import Storage


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    return open_tiers(str(tmp_path / "durable"), str(tmp_path / "local"))


def commit(storage: Storage, step: int, attempt: int = 1) -> None:
    data = b"state"
    files = [StagedFile("file", [memoryview(data)], lambda: digest_buffer(data))]
    commit_snapshot(storage, SnapshotInfo("run", attempt, step, 1, step), files)


def found(tiers: Tiers) -> list[tuple[int, str, bool]]:
    return [(entry.step, tiers.name(entry.storage), entry.manifest is not None) for entry in tiers.catalog.entries()]


def test_newest_first_and_of_one_step_the_nearest(tiers: Tiers) -> None:
    assert tiers.local is not None
    for storage, step in [(tiers.durable, 10), (tiers.durable, 20), (tiers.local, 20), (tiers.local, 30)]:
        commit(storage, step)
    assert found(tiers) == [
        (30, "local", True),
        (20, "local", True),
        (20, "remote", True),
        (10, "remote", True),
    ]
    assert tiers.catalog.find(20).storage is tiers.local
    assert tiers.catalog.find(10).storage is tiers.durable
    with pytest.raises(InvalidCheckpoint, match="committed steps: 10, 20, 30"):
        tiers.catalog.find(15)


def test_what_an_old_machine_kept_does_not_count_when_others_have_gone_on(tiers: Tiers) -> None:
    """It comes back with a newer step than the others have, but of a line of history that was left."""
    assert tiers.local is not None
    tiers.local.begin_attempt(1)
    tiers.durable.begin_attempt(1)
    commit(tiers.durable, 10)
    commit(tiers.local, 20)
    tiers.durable.begin_attempt(2)  # another machine, which saw step 10 alone
    assert found(tiers) == [(20, "local", False), (10, "remote", True)]
    assert tiers.catalog.newest_attempt() == 2


def test_what_lies_in_the_local_tier_of_this_machine_goes_on_to_count(tiers: Tiers) -> None:
    assert tiers.local is not None
    tiers.local.begin_attempt(1)
    tiers.durable.begin_attempt(1)
    commit(tiers.local, 20)
    tiers.local.begin_attempt(2)
    tiers.durable.begin_attempt(2, tiers.local.counting())
    assert found(tiers) == [(20, "local", True)]
    commit(tiers.durable, 20)  # uploaded by the newer attempt, as the work of the older one
    assert found(tiers) == [(20, "local", True), (20, "remote", True)]


def test_a_try_whose_answer_was_lost_is_our_own(tiers: Tiers) -> None:
    storage = tiers.durable
    storage.begin_attempt(1)
    storage.begin_attempt(1)
    commit(storage, 5)
    with pytest.raises(Fenced):
        open_tiers(storage.location).durable.begin_attempt(1)


@pytest.mark.parametrize(
    ("location", "local", "message"),
    [("a", "s3://bucket/x", "give a directory of this machine"), ("a", "./a", "is checkpoint.location itself")],
)
def test_senseless_places_are_refused(location: str, local: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_tiers(location, local)


def test_what_an_old_machine_commits_for_itself_does_not_count_when_it_comes_back(tiers: Tiers, tmp_path: Path) -> None:
    """Cut off, it went on; another machine did, too; then it is back, and begins the next attempt."""
    assert tiers.local is not None

    def begin(tiers: Tiers, attempt: int) -> Writer:
        writer = Writer(tiers, lambda message, arena: None, commits=True, local_retention=Retention(2))
        assert writer.begin_attempt(attempt, ()).answered.wait(120)
        return writer

    begin(tiers, 1)
    commit(tiers.local, 10)
    commit(tiers.durable, 10)
    other = open_tiers(tiers.durable.location, str(tmp_path / "other"))
    begin(other, 2)
    commit(other.durable, 20, attempt=2)
    commit(tiers.local, 30)
    begin(tiers, 3)
    assert (30, "local", True) not in found(tiers)
    assert tiers.catalog.committed_steps() == [10, 20]
