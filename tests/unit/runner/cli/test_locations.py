"""What a user's names of checkpoints stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.runner.cli.test_checkpoints import run, stages

from checkpointing.errors import InvalidCheckpoint
from runner.cli.locations import checkpoint_named, split_checkpoint, storage_at
from runner.errors import UsageError

__all__ = ["run", "stages"]  # fixtures


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("s3://bucket/run/checkpoint-10", ("s3://bucket/run", 10)),
        ("run/checkpoint-10/", ("run", 10)),
        ("checkpoint-10", (".", 10)),
        ("/checkpoint-10", ("/", 10)),
        ("run/checkpoint-10.invalid", ("run/checkpoint-10.invalid", None)),
        ("run", ("run", None)),
    ],
)
def test_a_name_is_split(name: str, parts: tuple[str, int | None]) -> None:
    assert split_checkpoint(name) == parts


def test_a_location_stands_for_its_newest_checkpoint(run: Path) -> None:
    assert checkpoint_named(str(run)).step == 40
    assert checkpoint_named(f"{run}/checkpoint-10").step == 10
    with pytest.raises(InvalidCheckpoint, match="there is no such checkpoint; committed steps: 10, 20, 30, 40"):
        checkpoint_named(f"{run}/checkpoint-7")


def test_the_last_stage_is_the_newest(stages: Path) -> None:
    assert checkpoint_named(str(stages)).step == 50
    with pytest.raises(UsageError, match=r"several stages have a checkpoint-40: name one in .*/stage-2-dpo"):
        checkpoint_named(f"{stages}/checkpoint-40")


def test_a_run_is_written_to_where_its_checkpoints_are(run: Path, tmp_path: Path) -> None:
    assert storage_at(str(run)).location == str(run / "checkpoints")
    assert storage_at(str(tmp_path / "new")).location == str(tmp_path / "new")
