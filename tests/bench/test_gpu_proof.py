"""The driver without a GPU; tests/integration/test_second_device.py runs its stages on a simulated device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench.support import BENCH, smoke

ALL = ["memory", "order", "fork", "engine", "ranks", "recovery", "faults", "sft"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: scripts/gpu-proof")
def test_without_a_gpu_every_stage_is_skipped_and_listed(tmp_path: Path) -> None:
    answer, output = smoke("gpu_proof", tmp_path)
    assert answer.keys() == {"device", "machine", "stages"} and answer["device"] is None
    stages = {stage["stage"]: stage for stage in answer["stages"]}
    assert list(stages) == ALL
    for stage in stages.values():
        assert stage.keys() == {"stage", "skipped", "seconds", "figures", "verdicts", "error"}
        assert stage["skipped"] and not stage["error"], output


def test_the_stages_can_be_imported() -> None:
    """They run on a GPU only, but a name that has gone shows on any machine."""
    path = [str(BENCH), str(BENCH.parents[1] / "tests"), str(BENCH.parents[1])]
    code = f"import sys; sys.path[:0] = {path!r}; from gpu_proof.stages import STAGES; print(*STAGES)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.split() == ALL, done.stderr
