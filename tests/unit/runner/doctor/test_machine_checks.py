"""What the doctor finds about the places for checkpoints."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.errors import CheckpointError, InvalidCheckpoint
from checkpointing.format.manifest import FileEntry, Manifest
from checkpointing.storage.rates import Rates
from runner.config.schema import Config
from runner.doctor import machine_checks
from runner.doctor.findings import Finding, Level
from runner.doctor.machine_checks import check_folder, check_locations, check_node, nearest_folder

GB = 10**9


class Place:
    """In place of a storage, with the answers of a test."""

    location, root = "/data", None
    decides_between_writers = True

    def __init__(
        self,
        free: int | None = 100 * GB,
        rates: Rates | None = None,
        caveat: str | None = None,
        error: Exception | None = None,
    ) -> None:
        self.found: list[tuple[int, Any]] = []
        self._free, self._rates, self._caveat, self._error = free, rates, caveat, error

    def probe(self) -> str | None:
        if self._error is not None:
            raise self._error
        return self._caveat

    def free_bytes(self) -> int | None:
        return self._free

    def survey(self) -> list[tuple[int, Any]]:
        return self.found

    def measure(self, state_bytes: int) -> Rates | None:
        return self._rates


def examine(
    durable: Place, local: Place | None = None, kept: int | None = None, size: int | None = GB
) -> list[Finding]:
    """What is found, but that a commit was tried."""
    tiers = SimpleNamespace(durable=durable, nearest_first=[*([local] if local else []), durable])
    checkpoint = SimpleNamespace(local_keep_last=1)
    config: Any = SimpleNamespace(tiers=tiers, checkpoint=checkpoint)
    found = list(check_locations(config, size, kept))
    return [one for one in found if "a commit was tried" not in one.text]


@pytest.mark.parametrize(
    ("free_gb", "kept", "level"),
    [(1.9, 3, Level.FAIL), (2, 3, Level.WARN), (3.9, 3, Level.WARN), (4, 3, Level.OK), (4, 5, Level.WARN)],
)
def test_a_new_checkpoint_is_written_before_the_oldest_is_removed(free_gb: float, kept: int, level: Level) -> None:
    [found] = examine(Place(free=int(free_gb * GB)), kept=kept)
    assert found.level is level and found.subject == "checkpoint.location"
    assert f"{kept} checkpoints and one being written need {kept + 1}.00 GB" in found.text


def test_without_a_limit_some_checkpoints_are_assumed() -> None:
    assert "3 checkpoints and one" in examine(Place())[0].text


def test_the_local_tier_is_checked_for_what_it_keeps() -> None:
    local, durable = examine(Place(free=None), Place(free=3 * GB))[0], examine(Place(free=None))
    assert (local.subject, local.level) == ("checkpoint.local_tier", Level.OK) and "1 checkpoints and" in local.text
    assert durable == []


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(13, "Permission denied", "/data"), "/data cannot be used: Permission denied"),
        (CheckpointError("the bucket does not exist"), "/data cannot be used: the bucket does not exist"),
    ],
)
def test_a_place_that_cannot_be_used(error: Exception, text: str) -> None:
    [found] = examine(Place(error=error))
    assert (found.level, found.text) == (Level.FAIL, text) and found.fix


def test_one_tier_at_fault_does_not_hide_the_other() -> None:
    found = examine(Place(), Place(error=OSError(5, "Input/output error")))
    assert [(one.subject, one.level) for one in found] == [
        ("checkpoint.local_tier", Level.FAIL),
        ("checkpoint.location", Level.OK),
    ]


def test_what_the_storage_says_of_itself_is_a_warning() -> None:
    found = examine(Place(caveat="it has no locks"))[0]
    assert (found.level, found.text) == (Level.WARN, "it has no locks")


def test_bandwidth_of_a_disk_and_of_a_store() -> None:
    assert examine(Place(free=None, rates=Rates(write=500e6)))[0].text == (
        "writes and syncs 500 MB/s: a checkpoint of 1.00 GB takes 2.00 s"
    )
    store = Place(free=None, rates=Rates(write=500e6, read=1e9))
    assert "reads 1000 MB/s, and fences off concurrent writers" in examine(store)[0].text
    store.decides_between_writers = False
    assert "and cannot fence off concurrent writers" in examine(store)[0].text


@pytest.mark.parametrize(("skew_s", "levels"), [(5.0, [Level.OK]), (5.1, [Level.OK, Level.WARN])])
def test_clocks_that_differ(skew_s: float, levels: list[Level]) -> None:
    found = examine(Place(free=None, rates=Rates(write=1e9, clock_skew_s=skew_s)))
    assert [one.level for one in found] == levels


def test_without_a_checkpoint_the_free_space_is_only_reported() -> None:
    [found] = examine(Place(free=GB), size=None)
    assert found.level is Level.OK and "1.00 GB free at /data; no checkpoint says yet" in found.text


def test_the_newest_whole_checkpoint_says_how_much_each_needs() -> None:
    place = Place(free=3 * GB)
    sizes = {3: None, 2: GB, 1: 9 * GB}
    place.found = [
        (step, InvalidCheckpoint("checkpoint", "damaged") if size is None else manifest(step, size))
        for step, size in sizes.items()
    ]
    [found] = examine(place, size=None, kept=2)
    assert found.level is Level.OK and "2 checkpoints and one being written need 3.00 GB" in found.text


def manifest(step: int, nbytes: int) -> Manifest:
    return Manifest("run", 1, step, 1, 0, 0.0, (FileEntry("a", nbytes, "d"),))


def test_a_real_directory_is_tried_and_not_made(tmp_path: Path) -> None:
    location = tmp_path / "above" / "new"
    config = Config.model_validate({"output_dir": str(tmp_path), "checkpoint": {"location": str(location)}})
    found = list(check_locations(config, 1000, None))
    assert {one.level for one in found} == {Level.OK}
    assert f"{location}: a commit was tried in {tmp_path}, the folder that exists" in found[0].text
    assert list(tmp_path.iterdir()) == []
    location.mkdir(parents=True)
    assert f"{location}: a commit was tried, read back" in next(check_locations(config, None, None)).text


def test_the_folder_of_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "train"
    [found] = check_folder(folder)
    assert found.level is Level.OK and f"{folder} can be written (" in found.text
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").write_text("a file")
    [found] = check_folder(folder)
    assert (found.level, found.subject) == (Level.FAIL, "output_dir") and "File exists" in found.text


@pytest.mark.parametrize(
    ("total", "free", "levels"),
    [(10**6, 9_999, [Level.OK, Level.WARN]), (10**6, 10_000, [Level.OK]), (0, 0, [Level.OK])],
)
def test_inodes(total: int, free: int, levels: list[Level], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_files=total, f_favail=free))
    assert [one.level for one in check_folder(tmp_path)] == levels


def test_the_folder_above_what_does_not_exist(tmp_path: Path) -> None:
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path
    (tmp_path / "a").symlink_to("nowhere")
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path / "a"


@pytest.mark.parametrize(
    ("rank_bytes", "state_bytes", "level", "text"),
    [
        (0, 0, Level.OK, "what the ranks and two snapshots need is not known"),
        (0, 2 * GB, Level.OK, "two snapshots need 4.00 GB"),
        (0, 3 * GB, Level.WARN, "without room for two"),
        (1 * GB, 2 * GB, Level.WARN, "2 ranks need about 2.00 GB, two snapshots 4.00 GB"),
        (2 * GB, 2 * GB, Level.FAIL, "2 ranks need about 4.00 GB"),
    ],
)
def test_memory(rank_bytes: int, state_bytes: int, level: Level, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "available_bytes", lambda: 5 * GB)
    found = next(check_node(Config(), 2, False, rank_bytes, state_bytes))
    assert found.level is level and text in found.text


@pytest.mark.parametrize(
    ("soft", "hard", "level"), [(1024, 4096, Level.OK), (1024, 4095, Level.WARN), (1024, -1, Level.OK)]
)
def test_a_start_raises_its_limit_of_open_files(
    soft: int, hard: int, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    assert [one.level for one in check_node(Config(), 1, False, 0, 0) if one.subject == "open files"] == [level]
