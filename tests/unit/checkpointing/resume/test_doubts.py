"""When a checkpoint that was read wrongly is condemned, and when the storage is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos.stores import MemoryObjects
from helpers.small_checkpoint import Agent, write_checkpoint
from unit.checkpointing.resume.test_agreement import TRAINING, chosen

from checkpointing.commit.catalog import verify
from checkpointing.commit.protocol import StagedFile, commit_snapshot
from checkpointing.commit.tiers import Tiers
from checkpointing.errors import CheckpointError, StorageUnreachable
from checkpointing.format.digest import digest_buffer
from checkpointing.format.manifest import MANIFEST_NAME
from checkpointing.host.environment import READ_PATIENCE_ENV, read_patience_s
from checkpointing.resume.doubts import Doubts
from checkpointing.storage import open_storage
from checkpointing.storage.object_storage import ObjectStorage

NEWEST, OTHER = (20, 0), (10, 0)


class Clock:
    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def doubts(clock: Clock) -> Doubts:
    return Doubts(330.0, clock, clock.sleep)


def test_a_file_on_a_disk_is_read_twice(doubts: Doubts, clock: Clock) -> None:
    doubts.add(NEWEST, "model.safetensors was altered", rank=1, is_remote=False)
    assert not doubts.is_condemned(NEWEST) and doubts.wait(NEWEST) and clock.now < 2
    doubts.add(NEWEST, "model.safetensors was altered", rank=1, is_remote=False)
    (one,) = doubts.condemned
    assert (one.step, one.tier, one.rank, one.is_remote) == (20, 0, 1, False)


def test_a_disk_that_gives_other_bytes_each_time_is_read_three_times(doubts: Doubts, clock: Clock) -> None:
    for number in range(3):
        assert not doubts.is_condemned(NEWEST)
        doubts.add(NEWEST, f"model.safetensors was altered ({number} was read)", rank=0, is_remote=False)
        doubts.wait(NEWEST)
    assert doubts.is_condemned(NEWEST) and clock.now < 3


def test_what_comes_from_elsewhere_must_be_wrong_for_minutes(doubts: Doubts, clock: Clock) -> None:
    reads = 0
    while not doubts.is_condemned(NEWEST):
        doubts.add(NEWEST, "altered", rank=0, is_remote=True)
        doubts.wait(NEWEST)
        reads += 1
    assert 330 <= clock.now < 400 and 10 < reads < 30
    # The next one need not be waited for as long.
    began = clock.now
    while not doubts.is_condemned(OTHER):
        doubts.add(OTHER, "altered", rank=0, is_remote=True)
        doubts.wait(OTHER)
    assert clock.now - began < 20


def test_other_bytes_each_time_condemn_nothing(doubts: Doubts, clock: Clock) -> None:
    for number in range(40):
        doubts.add(NEWEST, f"file {number} was altered", rank=0, is_remote=True)
        doubts.wait(NEWEST)
    assert clock.now > 660 and not doubts.is_condemned(NEWEST) and doubts.is_hopeless(NEWEST)


def test_what_was_never_doubted_is_not_waited_for(doubts: Doubts, clock: Clock) -> None:
    assert not doubts.wait(NEWEST) and not clock.slept


class DamagedWay(MemoryObjects):
    """A store, and a way to it that damages what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads, self.num_damaged = 0, 0
        self.damages: Callable[[str], bool] = lambda key: False

    def _arrived(self, key: str, data: bytes) -> bytes:
        if not self.damages(key):
            return data
        self.num_damaged += 1
        return bytes(len(data) // 2) + data[len(data) // 2 :]

    def get(self, key: str) -> bytes | None:
        data = super().get(key)
        return data if data is None else self._arrived(key, data)

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        super().read_into(key, start, target)
        target[:] = self._arrived(key, bytes(target))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DamagedWay:
    monkeypatch.setenv(READ_PATIENCE_ENV, "0.3")
    found = DamagedWay()
    for step in (10, 20):
        write_checkpoint(tmp_path, step, TRAINING)
        manifest = open_storage(str(tmp_path)).read_manifest(step)
        files = {one.name: (tmp_path / f"checkpoint-{step}" / one.name).read_bytes() for one in manifest.files}
        staged = [
            StagedFile(name, [memoryview(data)], functools.partial(digest_buffer, data)) for name, data in files.items()
        ]
        commit_snapshot(ObjectStorage(found), manifest.info, staged)
    return found


def is_data(key: str) -> bool:
    return key.endswith("model.safetensors")


@pytest.mark.parametrize("what", ["model.safetensors", MANIFEST_NAME])
def test_a_fault_that_passes_costs_no_checkpoint(what: str, store: DamagedWay, tmp_path: Path) -> None:
    store.damages = lambda key: key.endswith(what) and store.num_damaged < 3
    tiers, agent = Tiers(ObjectStorage(store)), Agent(tmp_path)
    assert chosen(tiers, agent) == 20
    assert store.num_damaged == 3 and tiers.durable.quarantined() == []


@pytest.mark.parametrize("what", ["model.safetensors", MANIFEST_NAME])
def test_a_way_that_damages_everything_is_at_fault_itself(what: str, store: DamagedWay, tmp_path: Path) -> None:
    store.damages = lambda key: key.endswith(what)
    tiers, agent = Tiers(ObjectStorage(store)), Agent(tmp_path)
    with pytest.raises(StorageUnreachable, match=r"at fault. Nothing was renamed"):
        chosen(tiers, agent)
    store.damages = lambda key: False
    assert tiers.durable.quarantined() == [] and tiers.catalog.committed_steps() == [10, 20]
    assert verify(tiers.durable, 20).step == 20


def test_one_that_stays_damaged_is_renamed_once_another_was_read(store: DamagedWay, tmp_path: Path) -> None:
    store.damages = lambda key: is_data(key) and "checkpoint-20/" in key
    tiers, agent = Tiers(ObjectStorage(store)), Agent(tmp_path)
    assert chosen(tiers, agent) == 10
    assert len(tiers.durable.quarantined()) == 1 and tiers.catalog.committed_steps() == [10]


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_the_patience_is_a_number_of_seconds(text: str) -> None:
    assert read_patience_s({}) == 330.0 and read_patience_s({READ_PATIENCE_ENV: "5"}) == 5.0
    with pytest.raises(CheckpointError, match=READ_PATIENCE_ENV):
        read_patience_s({READ_PATIENCE_ENV: text})
