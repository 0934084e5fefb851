"""Options of a manager: validated, with what the supervisor and the user's environment override."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpointing.commit.retention import Retention
from checkpointing.host.environment import RankSettings
from checkpointing.manager.options import Options, resume_policy
from checkpointing.snapshot.cadence import Cadence


def resolve(settings: RankSettings | None = None, **changes: Any) -> Options:
    values: dict[str, Any] = {"location": None, "local_tier": None, "local_keep_last": 1, "resume": None}
    values |= {"memory_limit": None, "cadence": Cadence(), "retention": Retention(), "overlap": None}
    return Options.resolve(
        settings or RankSettings(), **{**values, "check_replicas": True, "buddy_copies": True, **changes}
    )


def test_a_location_is_needed() -> None:
    with pytest.raises(ValueError, match="needs a location: a directory"):
        resolve()


def test_a_script_chooses_where_there_is_no_supervisor(tmp_path: Path) -> None:
    options = resolve(location=tmp_path / "own", local_tier=tmp_path / "fast", resume=40, memory_limit="2KiB")
    assert options.own_location == str(tmp_path / "own") == options.tiers.durable.location
    assert options.tiers.local is not None and options.tiers.local.location == str(tmp_path / "fast")
    assert (options.resume, options.memory_limit, options.has_chosen_location) == (40, 2048, False)


def test_a_supervisors_location_brings_its_own_local_tier(tmp_path: Path) -> None:
    settings = RankSettings(location=str(tmp_path / "run"), resume="auto")
    options = resolve(settings, location="own", local_tier=tmp_path / "fast", resume="never")
    assert options.own_location == "own" and options.tiers.durable.location == str(tmp_path / "run")
    assert options.tiers.local is None and options.resume == "auto" and options.has_chosen_location


def test_intervals_of_the_run_come_before_those_of_the_script() -> None:
    """`--set checkpoint.snapshot_steps=3` had no effect with a script."""
    own = Cadence(snapshot_steps=7, save_steps=20)
    assert resolve(location="own", cadence=own).cadence == own
    settings = RankSettings(cadence={"snapshot_steps": 3, "save_minutes": 5.0})
    assert resolve(settings, location="own", cadence=own).cadence == Cadence(3, 20, 5.0)
    assert resolve(RankSettings(cadence={"snapshot_steps": None}), location="x", cadence=own).cadence == Cadence(
        None, 20
    )


@pytest.mark.parametrize("text", ["newest", "-1", "1.5", "", "\N{SUPERSCRIPT TWO}"])
def test_anything_but_a_policy_or_a_step_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="use auto, never, or the number of a committed step"):
        resume_policy(text)
