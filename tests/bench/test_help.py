"""Each benchmark at least starts, which a name that has gone would prevent; most of them are too long for every run."""

from __future__ import annotations

import subprocess
import sys

import pytest
from bench.support import BENCH

NAMES = sorted(path.parent.name for path in BENCH.glob("*/__main__.py"))


def test_they_are_found() -> None:
    assert {"checkpoint", "gpu_proof", "prediction", "recovery", "scaling", "storage"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_explains_its_options(name: str) -> None:
    done = subprocess.run([sys.executable, str(BENCH / name), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--json" in done.stdout, done.stderr
