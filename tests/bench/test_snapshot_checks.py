from __future__ import annotations

from pathlib import Path

import pytest
from bench.support import all_finite, smoke


@pytest.mark.soak
def test_every_stage(tmp_path: Path) -> None:
    figures, output = smoke("snapshot_checks", tmp_path, "--smoke", "--docs", str(tmp_path))
    assert figures.keys() == {
        "samples_ms",
        "samples_share_of_steps",
        "step_with_checks_vs_without",
        "finiteness_share_of_copy_thread",
    }
    assert all_finite(figures) and figures["samples_ms"] > 0, output
    assert "| figure | value | bar |" in (tmp_path / "snapshot_checks.md").read_text()
