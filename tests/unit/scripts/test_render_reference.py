from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def differing_packages() -> list[str]:
    """Packages whose version decides what the pages say, and which are not those that the pages were made with."""
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    differing = []
    for name in ("click", "griffelib", "prometheus_client", "pydantic", "transformers", "trl"):
        try:
            if version(name) != pinned[name]:
                differing.append(name)
        except PackageNotFoundError:
            differing.append(name)
    return differing


def test_the_reference_says_what_the_code_says() -> None:
    if names := differing_packages():
        pytest.skip(f"the pages are made with the versions of constraints.txt, which differ here: {', '.join(names)}")
    command = [sys.executable, "-m", "scripts.reference", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
