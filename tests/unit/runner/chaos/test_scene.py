"""Where the runs of a campaign keep their checkpoints: never at the job's own location."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.chaos.scene import Locations
from runner.config.schema import Config


def locations(**checkpoint: Any) -> Locations:
    return Locations(Config.model_validate({"checkpoint": checkpoint}), "friday")


def test_without_a_location_checkpoints_are_in_the_runs_folder(tmp_path: Path) -> None:
    found = locations()
    assert found.location(tmp_path / "run-1") == str(tmp_path / "run-1" / "checkpoints")
    assert found.local_tier(tmp_path / "run-1") is None


@pytest.mark.parametrize("location", ["s3://bucket/job", "s3://bucket/job/"])
def test_runs_have_places_of_their_own_at_the_jobs_location(location: str, tmp_path: Path) -> None:
    found = locations(location=location, local_tier="/fast")
    assert found.location(tmp_path / "run-1") == "s3://bucket/job/chaos-friday/run-1"
    assert found.local_tier(tmp_path / "run-2") == "/fast/chaos-friday/run-2"
    assert found.settings(tmp_path / "run-1") == [
        *("--set", "checkpoint.location=s3://bucket/job/chaos-friday/run-1"),
        *("--set", "checkpoint.local_tier=/fast/chaos-friday/run-1"),
    ]


def test_removing_a_run_leaves_the_others_and_the_job(tmp_path: Path) -> None:
    found = locations(location=str(tmp_path / "job"), local_tier=str(tmp_path / "fast"))
    (tmp_path / "job" / "checkpoint-7").mkdir(parents=True)
    runs = [tmp_path / f"run-{number}" for number in (1, 2)]
    for run in runs:
        run.mkdir()
        for storage in found.tiers(run).nearest_first:
            assert storage.root is not None
            (storage.root / "checkpoint-5").mkdir(parents=True)
    found.remove(runs[0])
    assert not runs[0].exists() and runs[1].exists()
    assert [storage.steps() for storage in found.tiers(runs[0]).nearest_first] == [[], []]
    assert [storage.steps() for storage in found.tiers(runs[1]).nearest_first] == [[5], [5]]
    assert (tmp_path / "job" / "checkpoint-7").exists()
