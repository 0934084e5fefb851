"""What the doctor finds about the places for checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.errors import CheckpointError
from checkpointing.storage.rates import Rates
from runner.doctor.findings import Finding, Level
from runner.doctor.machine_checks import check_locations

GB = 10**9


class Place:
    """In place of a storage, with the answers of a test."""

    location = "/data"
    decides_between_writers = True

    def __init__(
        self,
        free: int | None = 100 * GB,
        rates: Rates | None = None,
        caveat: str | None = None,
        error: Exception | None = None,
    ) -> None:
        self._free, self._rates, self._caveat, self._error = free, rates, caveat, error

    def probe(self) -> str | None:
        if self._error is not None:
            raise self._error
        return self._caveat

    def free_bytes(self) -> int | None:
        return self._free

    def measure(self, state_bytes: int) -> Rates | None:
        return self._rates


def examine(durable: Place, local: Place | None = None, **trainer: Any) -> list[Finding]:
    tiers = SimpleNamespace(durable=durable, nearest_first=[*([local] if local else []), durable])
    checkpoint = SimpleNamespace(local_keep_last=1)
    config: Any = SimpleNamespace(tiers=tiers, trainer=trainer, checkpoint=checkpoint)
    return list(check_locations(config, GB))


@pytest.mark.parametrize(
    ("free_gb", "kept", "level"),
    [(1.9, 3, Level.FAIL), (2, 3, Level.WARN), (3.9, 3, Level.WARN), (4, 3, Level.OK), (4, 5, Level.WARN)],
)
def test_a_new_checkpoint_is_written_before_the_oldest_is_removed(free_gb: float, kept: int, level: Level) -> None:
    [found] = examine(Place(free=int(free_gb * GB)), save_total_limit=kept)
    assert found.level is level and found.subject == "checkpoint.location"
    assert f"{kept} checkpoints and one being written need {kept + 1}.00 GB" in found.text


def test_without_a_limit_some_checkpoints_are_assumed() -> None:
    assert "3 checkpoints and one" in examine(Place(), save_total_limit=None)[0].text


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


def test_a_real_directory(tmp_path: Path) -> None:
    from runner.config.schema import Config

    config = Config.model_validate({"output_dir": str(tmp_path), "checkpoint": {"location": str(tmp_path / "new")}})
    found = list(check_locations(config, 1000))
    assert {one.level for one in found} <= {Level.OK, Level.WARN} and found
