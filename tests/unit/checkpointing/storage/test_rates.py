"""What a location is measured by."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from chaos.stores import MemoryObjects

from checkpointing.storage import rates
from checkpointing.storage.object_store import StorageError
from checkpointing.storage.rates import measure_directory, measure_objects


class Usage(NamedTuple):
    free: int


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(rates, "_PROBE_BYTES", 3 << 16)


def test_a_directory_is_measured_by_writing_and_left_as_it_was(tmp_path: Path) -> None:
    measured = measure_directory(tmp_path, 1 << 20)
    assert measured is not None
    # Reading back would measure the page cache.
    assert measured.write > 0 and measured.read is None and measured.clock_skew_s < 60
    assert list(tmp_path.iterdir()) == []


def test_a_full_directory_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda root: Usage(free=1000))
    assert measure_directory(tmp_path, 1 << 20) is None


def test_an_object_store_is_measured_both_ways_and_left_as_it_was() -> None:
    store = MemoryObjects()
    measured = measure_objects(store, 5 << 16)
    assert measured.write > 0 and measured.read is not None and measured.read > 0
    assert store.objects == {}


def test_a_store_that_alters_bytes_is_refused() -> None:
    class Altering(MemoryObjects):
        def read_into(self, key: str, start: int, target: memoryview) -> None:
            super().read_into(key, start, target)
            target[0] ^= 1

    store = Altering()
    with pytest.raises(StorageError, match="other bytes than were uploaded"):
        measure_objects(store, 1 << 16)
    assert store.objects == {}
