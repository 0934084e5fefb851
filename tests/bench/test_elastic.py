from __future__ import annotations

from pathlib import Path

import pytest
from bench.support import all_finite, smoke


@pytest.mark.soak
def test_every_stage(tmp_path: Path) -> None:
    figures, output = smoke("elastic", tmp_path, "--smoke", "--docs", str(tmp_path))
    assert figures.keys() == {
        "node_loss_s",
        "node_loss_vs_best_peer",
        "lost_steps",
        "join_pause_s",
        "storage_bytes_read",
        "leader_loss_s",
    }
    assert all_finite(figures), output
    # Unlike times, these must be right at any load.
    assert figures["storage_bytes_read"] == 0 and figures["lost_steps"] <= 1, output
    assert "`runner start --nnodes 2:3`" in (tmp_path / "elastic.md").read_text()
