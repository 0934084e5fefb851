"""Every extra of the wheel can be installed by pip into an empty environment, without a list of versions.

pip only resolves: of what it would install, it reads the metadata.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
from infra.parts import lacks
from integration.test_wheel import ROOT, run, wheel  # noqa: F401 - A fixture.

_EACH = list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
TOGETHER = ",".join(_EACH)
EXTRAS = [*_EACH, TOGETHER]
# What pip says where it reaches no index.
UNREACHABLE = (
    "Failed to establish a new connection",
    "Temporary failure in name resolution",
    "Connection to ",
    "timed out",
)
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    "extras",
    # The others are in the last one, too.
    [pytest.param(one, marks=pytest.mark.system if one == TOGETHER else pytest.mark.soak) for one in EXTRAS],
)
def test_an_extra_can_be_installed(extras: str, wheel: Path, tmp_path: Path) -> None:  # noqa: F811
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--retries", "1"]
    done = run([*command, "--report", str(report), f"{wheel}[{extras}]"])
    if done.returncode and any(text in done.stderr for text in UNREACHABLE):
        lacks("PyPI", "pip reaches no index")
    assert done.returncode == 0, done.stderr[-3000:]
    found = {
        one["metadata"]["name"].lower(): one["metadata"]["version"] for one in json.loads(report.read_text())["install"]
    }
    assert "torch" in found and "resilient-training" in found
    if "s3" in extras.split(","):
        # pip went back to the oldest s3fs, or further.
        assert found["s3fs"] == found["fsspec"] and int(found["s3fs"].partition(".")[0]) >= 2026, found


def test_its_size_is_that_in_the_documentation(wheel: Path) -> None:  # noqa: F811
    text = (ROOT / "docs" / "getting-started.md").read_text()
    assert f"the wheel itself is {wheel.stat().st_size / 1e6:.1f} MB" in text
