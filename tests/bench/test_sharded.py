from __future__ import annotations

from pathlib import Path

import pytest
from bench.support import all_finite, smoke


@pytest.mark.soak
def test_every_stage(tmp_path: Path) -> None:
    figures, output = smoke("sharded", tmp_path, "--smoke", "--docs", str(tmp_path))
    expected = {
        "blocked_vs_dcp",
        "durable_vs_dcp",
        "reshard_load_vs_dcp",
        "peak_memory_vs_dcp",
        "blocked_vs_deepspeed",
        "durable_vs_deepspeed",
        "export_memory_mb",
    }
    # They need a server of S3.
    links = {"two_writers_speedup", "two_shard_writers_speedup"}
    assert expected <= figures.keys() <= expected | links and all_finite(figures), output
    # Unlike times, this must be right at any load.
    assert figures["export_memory_mb"] <= 512, output
    assert "`two_writers_speedup`" in (tmp_path / "sharded.md").read_text()
