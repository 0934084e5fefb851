"""Whether a location is the one where the run's checkpoints were."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.journals import entries

from checkpointing.commit.tiers import Tiers
from checkpointing.storage import LocalStorage
from runner.errors import CheckpointsMissing, ExitCode
from runner.session.location_id import Found, Remembered, compare, ensure_id, look, read_id, remember


def event(name: str, **details: Any) -> dict[str, Any]:
    return {"event": name, "time": 1.0, "attempt": 1, **details}


def test_a_journal_remembers_the_place_and_the_newest_step_there() -> None:
    events = [
        event("run_started", place="a"),
        event("training_started", step=0),
        event("committed", step=10, tier="remote"),
        event("committed", step=20, tier="local"),
        event("run_started", place="b"),
        event("run_started", place=None),
        event("committed", step="x", tier="remote"),
    ]
    assert remember(entries(events), "remote") == Remembered("b", 10)
    assert remember(entries(events), "local") == Remembered("b", 20)
    assert remember([], "local") == Remembered(None, None)


def test_what_was_given_up_is_not_remembered() -> None:
    """It was damaged, or the user has gone back by --resume STEP."""
    events = [event("committed", step=step, tier="local") for step in (10, 20, 30)]
    events += [event("training_started", step=20)]
    assert remember(entries(events), "local").step == 20
    assert remember(entries([*events, event("committed", step=25, tier="local")]), "local").step == 25


@pytest.mark.parametrize(
    ("remembered", "found", "told"),
    [
        # Nothing was committed, or nothing is known of it.
        (Remembered(None, None), Found(None, None, True), None),
        (Remembered("a", None), Found("b", None, True), None),
        # All is there.
        (Remembered("a", 30), Found("a", 30, False), None),
        (Remembered("a", 30), Found("a", 40, False), None),
        (Remembered(None, 30), Found("b", 30, False), None),
        (Remembered("a", 30), Found("b", 30, False), "is a new location for this run; it holds step 30"),
        # The newest one has vanished.
        (
            Remembered("a", 30),
            Found("a", 20, False),
            "step 30 was committed but is missing at /x; resuming from step 20",
        ),
        (Remembered(None, 30), Found("b", 20, False), "step 30 was committed but is missing"),
        (Remembered("a", 30), Found("a", 20, False, quarantined=True), None),
        # There are some, and none is valid, which the ranks report.
        (Remembered("a", 30), Found("a", None, False), None),
    ],
)
def test_a_run_goes_on_where_its_checkpoints_are(remembered: Remembered, found: Found, told: str | None) -> None:
    note = compare(remembered, found, "/x")
    assert note == told if told is None else told in (note or "")


@pytest.mark.parametrize(
    ("remembered", "found", "why"),
    [
        (Remembered("a", 30), Found(None, None, True), "'/x' holds no checkpoint"),
        (Remembered("a", 30), Found("a", None, True), "'/x' holds no checkpoint"),
        (Remembered(None, 30), Found(None, None, True), "'/x' holds no checkpoint"),
        (Remembered("a", 30), Found("b", 20, False), "is another location and does not hold step 30"),
        (Remembered("a", 30), Found(None, 20, False), "is another location and does not hold step 30"),
        (Remembered("a", 30), Found("b", None, False), "is another location and does not hold step 30"),
    ],
)
def test_an_empty_or_other_place_is_refused(remembered: Remembered, found: Found, why: str) -> None:
    with pytest.raises(CheckpointsMissing) as error:
        compare(remembered, found, "/x")
    assert error.value.exit_code is ExitCode.NO_VALID_CHECKPOINT
    text = str(error.value)
    for part in (why, "step 30 was committed", "mount the volume", "--resume never --overwrite"):
        assert part in text


def test_a_location_keeps_its_id(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "one")
    assert read_id(storage) is None
    first = ensure_id(storage)
    assert ensure_id(storage) == read_id(LocalStorage(tmp_path / "one")) == first
    assert ensure_id(LocalStorage(tmp_path / "two")) != first
    for damaged in (b"", b"[]", b'{"id": 3}', b'{"id": "../x"}', b"[" * 3000):
        storage.sidecars.write("place.json", damaged)
        assert read_id(storage) is None


def test_what_is_at_a_location(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    tiers = Tiers(storage)
    assert look(tiers, 5) == Found(None, None, True)
    place = ensure_id(storage)
    assert look(tiers, 5).is_empty, "its id is not a checkpoint"
    (tmp_path / "checkpoint-5").mkdir()
    assert look(tiers, 5) == Found(place, None, False, quarantined=True)
    kept = storage.quarantine(5)
    assert look(tiers, 5) == Found(place, None, False, quarantined=True)
    assert not look(tiers, 15).quarantined
    shutil.rmtree(kept)
    assert look(tiers, 5).is_empty


def test_a_damaged_checkpoint_is_not_a_missing_one(tmp_path: Path) -> None:
    """It was said to be missing, and then what is wrong with it."""
    tiers = Tiers(LocalStorage(tmp_path), None)
    assert not look(tiers, 30).quarantined
    (tmp_path / "checkpoint-30").mkdir()
    (tmp_path / "checkpoint-30" / "manifest.json").write_text("{")
    found = look(tiers, 30)
    assert found.newest is None and found.quarantined
