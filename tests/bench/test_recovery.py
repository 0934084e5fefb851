from __future__ import annotations

from pathlib import Path

import pytest
from bench.support import all_finite, smoke

# These, unlike times, must be right at any load.
COUNTS = ("hangs", "orphans")


@pytest.mark.soak
def test_every_stage(tmp_path: Path) -> None:
    figures, output = smoke("recovery", tmp_path, "--smoke", "--docs", str(tmp_path))
    assert figures.keys() == {
        "recovery_median_s",
        "recovery_vs_loop",
        "recovery_vs_torchrun",
        "hangs",
        "orphans",
        "step_overhead",
        "preempt_s",
    }
    assert all_finite(figures), output
    assert not any(figures[name] for name in COUNTS), output
    assert "1 kills" in output and "| bash loop around `torchrun` |" in output
    assert "**Preemption**" in (tmp_path / "recovery.md").read_text()
