from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Trainer

from checkpointing.host.environment import RankSettings
from runner.config.schema import CheckpointConfig, Config
from runner.config.trainer_options import validate
from runner.training.job import training_arguments


@pytest.mark.parametrize("location", ["s3://bucket/run", "file:///somewhere/run", None])
def test_the_trainer_makes_folders_in_the_runs_own_alone(
    location: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes whatever it is given for a path: a URL became a folder `s3:` in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    config = Config(
        output_dir=str(tmp_path / "run"),
        trainer=validate({"activation_checkpointing": False}, str),
        checkpoint=CheckpointConfig(location=location),
    )
    Trainer(model=torch.nn.Linear(1, 1), args=training_arguments(config))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["trainer"]


@pytest.mark.parametrize("planned", [0, 2, 5])
def test_the_learning_rate_follows_the_virtual_ranks_and_not_the_ranks(
    planned: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr("runner.training.job.rank_settings", lambda: RankSettings(planned_ranks=planned))
    elastic = {"mode": "exact", "virtual_ranks": 8}
    trainer = validate({"learning_rate": 1e-3, "activation_checkpointing": False}, str)
    config = Config.model_validate({"output_dir": str(tmp_path), "trainer": trainer, "elastic": elastic})
    assert training_arguments(config).learning_rate == 8e-3
