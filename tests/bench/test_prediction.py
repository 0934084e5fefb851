from __future__ import annotations

from pathlib import Path

import pytest
from bench.support import all_finite, smoke


@pytest.mark.soak
def test_every_stage(tmp_path: Path) -> None:
    figures, output = smoke("prediction", tmp_path, "--smoke", "--docs", str(tmp_path))
    assert figures.keys() == {"replay_points", "replay_worst_points", "forecast_points"}
    assert all_finite(figures), output
    assert "mean, by MTTF alone" in (tmp_path / "prediction.md").read_text()
