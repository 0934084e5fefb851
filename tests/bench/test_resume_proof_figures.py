from __future__ import annotations

from pathlib import Path

import pytest
from bench.support import all_finite, smoke


@pytest.mark.soak
def test_every_stage(tmp_path: Path) -> None:
    figures, output = smoke("resume_proof", tmp_path, "--smoke", "--docs", str(tmp_path))
    assert all_finite(figures), output
    assert figures["found_at_first_step"] == 1 and figures["false_alarms"] == 0, output
    assert "| left out | resumes | found | named |" in (tmp_path / "resume_proof.md").read_text()
