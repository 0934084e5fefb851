"""What is shown of the end of a run; how it reads is in test_boot.py."""

from __future__ import annotations

from pathlib import Path

from runner.config.schema import Config
from runner.journal.run_directory import RunDirectory
from runner.start.outcome import paths_of


def test_paths_that_exist_and_urls_are_shown(tmp_path: Path) -> None:
    config = Config.model_validate(
        {"output_dir": str(tmp_path), "checkpoint": {"location": "s3://bucket/run", "local_tier": str(tmp_path / "no")}}
    )
    directory = RunDirectory(str(tmp_path))
    directory.create()
    assert paths_of(config, directory) == {"checkpoints": "s3://bucket/run", "logs": str(tmp_path / "logs")}
