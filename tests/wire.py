"""The wire between two machines that are network namespaces, and how it is cut; fixtures for all tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

INFRA = Path(__file__).resolve().parents[2] / "shared" / "infra"


@pytest.fixture(scope="module")
def wire() -> Iterator[None]:
    """Namespaces na (10.99.0.1) and nb (10.99.0.2)."""
    if os.geteuid() != 0 or not (INFRA / "netns_up.sh").exists():
        pytest.skip("network namespaces need root, and ../shared/infra/netns_up.sh")
    up = subprocess.run(["bash", str(INFRA / "netns_up.sh")], capture_output=True, text=True, check=False, timeout=60)
    try:
        if up.returncode:
            pytest.skip(f"no network namespaces can be made here: {up.stderr.strip()}")
        yield
    finally:
        subprocess.run(["bash", str(INFRA / "netns_down.sh")], capture_output=True, check=False, timeout=60)


@pytest.fixture
def cut(wire: None) -> Iterator[Cut]:
    cut = Cut()
    yield cut
    cut.mend()


class Cut:
    """The wire of the second machine."""

    def now(self) -> None:
        subprocess.run(["ip", "-n", "nsw", "link", "set", "v-nb", "down"], check=True, timeout=20)

    def mend(self) -> None:
        subprocess.run(["ip", "-n", "nsw", "link", "set", "v-nb", "up"], check=True, timeout=20)
