"""DistributedDataParallel on three ranks and more: a resumed training sums gradients in the same order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from infra.torchrun import torchrun

PROGRAM = Path(__file__).parent / "ddp_program.py"
_ALWAYS = ("Plain", "Static", "Late", "PowerSgd", "TwoModules")
_SOAK = (
    *("LargeBuckets", "Unused", "Views", "NoSync", "Accumulated", "Evaluated", "Frozen", "OtherOrder"),
    *("StaticOtherOrder", "Mixed", "HalfHook", "Compiled", "ByUnwrapped"),
)
_CASES = [
    *((name, 3) for name in _ALWAYS),
    *(pytest.param(name, 3, marks=pytest.mark.soak) for name in _SOAK),
    *(pytest.param(name, ranks, marks=pytest.mark.soak) for ranks in (1, 2, 4, 8) for name in ("Plain", "PowerSgd")),
]


@pytest.mark.parametrize(("variant", "ranks"), _CASES)
def test_resumed_after_each_of_the_first_steps(variant: str, ranks: int, tmp_path: Path) -> None:
    ended = torchrun(PROGRAM, tmp_path, variant, ranks=ranks)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("{")))
    assert found["equal"], found
    assert "another order" not in ended.stderr
