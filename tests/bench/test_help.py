"""Each benchmark at least starts, which a name that has gone would prevent; most of them are too long for every run."""

from __future__ import annotations

import subprocess
import sys

import pytest
from bench.support import BENCH

# Not what they start as workers.
NAMES = sorted(path.stem for path in BENCH.glob("*.py") if "parser = make_parser(" in path.read_text())


def test_they_are_found() -> None:
    assert {"checkpoint", "prediction", "recovery", "scaling", "storage"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_explains_its_options(name: str) -> None:
    done = subprocess.run([sys.executable, str(BENCH / f"{name}.py"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--json" in done.stdout, done.stderr
