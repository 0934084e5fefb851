from __future__ import annotations

from pathlib import Path

import pytest
from bench.support import all_finite, smoke
from infra.parts import needs
from library.figures import Samples
from storage.figures import figures_of, table_of

# Two clusters at once would slow each other down.
pytestmark = [pytest.mark.xdist_group("radosgw"), needs("radosgw"), needs("rclone")]


@pytest.mark.soak
def test_every_stage(tmp_path: Path) -> None:
    figures, output = smoke("storage", tmp_path, "--smoke", "--scratch", str(tmp_path), "--docs", str(tmp_path))
    assert figures.keys() - {"slow_link_step_ratio"} == {
        "upload_vs_cli",
        "upload_vs_best",
        "upload_extra_mb",
        "resume_vs_download",
        "resume_vs_download_worst",
    }
    assert all_finite(figures)
    # The link needs a core of its own.
    assert ("slow_link_step_ratio" in figures) != ("slow link: left out" in output)
    assert "`upload_vs_cli`" in (tmp_path / "storage.md").read_text()


def test_figures_of_resumes_alone() -> None:
    """`--resumes` leaves uploads and the slow link out; its worst pair is one pair, not a quotient of extremes."""
    measured = Samples(list)
    measured["resume_s", "ours"], measured["resume_s", "download"] = [1.2, 2.0, 3.0], [1.0, 2.0, 2.0]
    measured["bytes", "checkpoint"] = [10**9]
    figures = figures_of(measured)
    assert figures == {"resume_vs_download": 1.2, "resume_vs_download_worst": 1.5}
    table = table_of(measured, figures)
    assert "| `resume_vs_download_worst` | 1.5 | ≤ 1.3 | MISS | of 3 pairs in turns |" in table
    assert "upload" not in table
