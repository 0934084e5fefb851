"""What a node that joins prepares is what its ranks look for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
from pathlib import Path
from runner.training import prepare
prepare.os.environ.update(prepare._ALONE)
prepare.prepare(sys.argv[1], Path(sys.argv[2]))
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
