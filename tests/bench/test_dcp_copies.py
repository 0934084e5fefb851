from __future__ import annotations

from pathlib import Path

import pytest
from bench.support import all_finite, smoke


@pytest.mark.soak
def test_both_ways(tmp_path: Path) -> None:
    figures, output = smoke("dcp", tmp_path, "--smoke", "--docs", str(tmp_path))
    assert figures.keys() == {"blocked_vs_stock", "durable_vs_stock", "total_vs_stock"}
    assert all_finite(figures), output
    assert "| figure | stock | protected | ratio | bar |" in (tmp_path / "dcp.md").read_text()
