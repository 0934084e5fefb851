"""A checkpoint that is read into an arena: digests are compared, and what fails is left to the ranks."""

from __future__ import annotations

import pytest
from unit.checkpointing.agent.doubles import STATE, Clock, Reports, Store, save

from checkpointing.agent.arenas import Arena, ArenaState
from checkpointing.agent.events import Fetched, FetchFailed, Transfer
from checkpointing.agent.writer import fetch
from checkpointing.commit.catalog import Catalog, CatalogEntry
from checkpointing.format.digest import digest_buffer
from checkpointing.host.shared_memory import SharedMemory
from checkpointing.storage.object_storage import ObjectStorage


class SlowStore(Store):
    """Every read takes a second."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        self._clock.now += 1
        super().read_into(key, start, target)
        self.transferred(len(target))


class Download:
    """A checkpoint of step 7 in a store, and an arena for it."""

    def __init__(self) -> None:
        self.clock, self.reports = Clock(), Reports()
        self.store = SlowStore(self.clock)
        self.storage = ObjectStorage(self.store)
        save(self.storage, 7)
        self.arena = Arena(0, SharedMemory.create("test-fetch", 4096))
        self.arena.begin(7, "", ArenaState.FETCHING)
        self.arena.files = [("file", 16, len(STATE))]

    @property
    def key(self) -> str:
        [key] = [key for key in self.store.objects if key.endswith("/file")]
        return key

    def run(self) -> None:
        [entry] = Catalog(self.storage).scan()
        assert isinstance(entry, CatalogEntry)
        fetch(entry, self.arena, "remote", self.reports, self.clock)


@pytest.fixture
def download() -> Download:
    return Download()


def test_files_are_placed_as_the_arena_says_and_keep_their_digests(download: Download) -> None:
    download.run()
    assert bytes(download.arena.view(16, len(STATE))) == STATE
    assert download.arena.digests == {"file": digest_buffer(STATE)} and download.arena.digested.is_set()
    progress, fetched = download.reports.results
    assert progress == Transfer(step=7, what="download", done=len(STATE), total=len(STATE))
    assert fetched == Fetched(step=7, tier="remote", nbytes=len(STATE), duration_s=1.0)
    assert download.reports[-1][1] is download.arena


def test_an_altered_file_is_reported_and_the_arena_offers_nothing(download: Download) -> None:
    key = download.key
    download.store.objects[key] = b"other"
    download.run()
    [(failure, arena)] = [one for one in download.reports if not isinstance(one[0], Transfer)]
    assert isinstance(failure, FetchFailed) and "file was altered: its digest differs" in failure.error
    assert arena is download.arena and not arena.digested.is_set() and arena.digests == {}


def test_a_file_that_disappears_meanwhile_is_reported(download: Download) -> None:
    [entry] = Catalog(download.storage).scan()
    del download.store.objects[download.key]
    fetch(entry, download.arena, "remote", download.reports, download.clock)
    [failure] = download.reports.results
    assert isinstance(failure, FetchFailed) and failure.step == 7 and "is missing" in failure.error


def test_an_error_of_any_kind_is_reported(download: Download, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks wait for the report."""

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(SlowStore, "read_into", fail)
    download.run()
    [failed] = download.reports.results
    assert isinstance(failed, FetchFailed) and failed.error == "MemoryError: no room"
