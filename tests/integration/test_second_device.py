"""`pytest -m device`, in a process of its own: once the second device is loaded, torch has an accelerator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from infra.parts import needs

ROOT = Path(__file__).parents[2]


@needs("C++ compiler")
def test_the_engine_on_a_second_device() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "device", "-p", "no:cacheprovider", "tests/device"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout and "skipped" not in result.stdout


def proof(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(ROOT / "scripts" / "gpu-proof"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: scripts/gpu-proof")
def test_the_proof_says_that_there_is_no_gpu() -> None:
    done = proof()
    assert done.returncode == 0 and done.stdout.count("no GPU: skipped") == 8, done.stdout + done.stderr
    assert proof("--stages", "memory,nothing").returncode == 2


# What each stage does is tested on this device by tests/device, and by the launches of tests/integration.
@pytest.mark.soak
@needs("C++ compiler")
@pytest.mark.parametrize("names", ["engine", "memory,order,fork,engine,ranks,recovery,faults,sft"])
def test_the_stages_of_the_proof_on_a_second_device(names: str, tmp_path: Path) -> None:
    files = ("--json", str(tmp_path / "a.json"), "--report", str(tmp_path / "a.md"))
    done = proof("--on", "sim:0", "--quick", "--stages", names, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    stages = {stage["stage"]: stage for stage in json.loads((tmp_path / "a.json").read_text())["stages"]}
    assert stages.keys() == set(names.split(","))
    assert stages["engine"]["verdicts"] == {"trains and snapshots": True}
    assert all(stage["skipped"] or all(stage["verdicts"].values()) for stage in stages.values())
    need_gpu = {name for name, stage in stages.items() if "needs a GPU" in stage["skipped"]}
    assert need_gpu == {"memory", "fork", "recovery"} & stages.keys()
    assert {name for name, stage in stages.items() if stage["skipped"]} == need_gpu
    assert "trains and snapshots | yes" in (tmp_path / "a.md").read_text()
    if "order" in stages:
        assert len(stages["order"]["verdicts"]) == 7
        assert "not torn by buffers | yes" in (tmp_path / "a.md").read_text()
