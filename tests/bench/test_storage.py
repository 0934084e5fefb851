from __future__ import annotations

from pathlib import Path

import pytest
from bench.support import all_finite, smoke
from infra.parts import needs

# Two clusters at once would slow each other down.
pytestmark = [pytest.mark.xdist_group("radosgw"), needs("radosgw"), needs("rclone")]


def test_every_stage(tmp_path: Path) -> None:
    figures, output = smoke("storage", tmp_path, "--smoke", "--scratch", str(tmp_path), "--docs", str(tmp_path))
    assert figures.keys() - {"slow_link_step_ratio"} == {
        "upload_vs_cli",
        "upload_vs_best",
        "upload_extra_mb",
        "resume_vs_download",
    }
    assert all_finite(figures)
    # The link needs a core of its own.
    assert ("slow_link_step_ratio" in figures) != ("slow link: left out" in output)
    assert "`upload_vs_cli`" in (tmp_path / "storage.md").read_text()
