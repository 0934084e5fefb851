from __future__ import annotations

import os
import shutil
import subprocess
import sys
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


CODE = """
import os, sys
from pathlib import Path
from runner.training.rank import ALONE
os.environ.update(ALONE)
from runner.training.job import prepare
prepare(sys.argv[1], Path(sys.argv[2]))
"""
JOB = ["trainer.max_steps=1", "data.validation_share=0.1", "trainer.packing=true", "trainer.max_length=64"]


def contents(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.suffix in (".arrow", ".json"))


@pytest.mark.process
def test_a_rank_finds_all_that_it_would_make(tmp_path: Path) -> None:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    output = tmp_path / "run"
    command = [sys.executable, "-m", "runner", "start", "--output-dir", str(output), "--nproc-per-node", "1"]
    command += [part for setting in JOB for part in ("--set", setting)]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
    made = contents(output / "cache")
    assert len([name for name in made if name.endswith(".arrow")]) > 5
    shutil.rmtree(output / "cache")
    prepare = [sys.executable, "-c", CODE, str(output / "config.yaml"), str(output / "cache")]
    subprocess.run(prepare, env=environment, check=True, capture_output=True, timeout=300)
    assert contents(output / "cache") == made
