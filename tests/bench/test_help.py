"""Each benchmark at least starts, which a name that has gone would prevent; most of them are too long for every run."""

from __future__ import annotations

import subprocess
import sys

import pytest
from bench.support import BENCH
from library.benchmark import DOCS, KEPT

NAMES = sorted(path.parent.name for path in BENCH.glob("*/__main__.py"))


def test_they_are_found() -> None:
    assert {"checkpoint", "gpu_proof", "prediction", "recovery", "scaling", "storage"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_explains_its_options(name: str) -> None:
    done = subprocess.run([sys.executable, str(BENCH / name), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--json" in done.stdout, done.stderr


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"gpu_proof"}))
def test_its_page_says_what_stays(name: str) -> None:
    """Without that line, a page would lose its text when it is written again."""
    assert (DOCS / f"{name}.md").read_text().count(f"\n\n{KEPT}\n\n") == 1
