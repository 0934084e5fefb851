from __future__ import annotations

from pathlib import Path

from bench.support import all_finite, smoke


def test_every_stage(tmp_path: Path) -> None:
    figures, output = smoke("scaling", tmp_path, "--smoke", "--docs", str(tmp_path))
    names = ("tokens_per_s", "scaling_efficiency", "communication_share")
    assert figures.keys() == {f"{name}_{ranks}" for name in names for ranks in (1, 2)}
    assert all_finite(figures) and figures["tokens_per_s_1"] > 0, output
    assert "| ranks | tokens/s |" in (tmp_path / "scaling.md").read_text()
