"""`runner chaos --nodes 3`: machines that come and go at random, whatever happens to them and to their network.

CHAOS_MINUTES=45 pytest -s -m soak tests/chaos/test_nodes.py          CHAOS_SEED=7 pytest ... draws the same again
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from infra.parts import require

MINUTES = float(os.environ.get("CHAOS_MINUTES", "5"))
SEED = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(2**24)))


@pytest.mark.soak
@pytest.mark.timeout(1800 + 120 * MINUTES)
def test_nodes_come_and_go(tmp_path: Path) -> None:
    require("network namespaces")
    verdict = tmp_path / "verdict.json"
    command = [str(Path(sys.executable).with_name("runner")), "chaos", "--nodes", "3", "--seed", str(SEED)]
    command += ["--kills", "10", "--minutes", str(MINUTES)]
    command += ["--output-dir", str(tmp_path / "runs"), "--json", str(verdict)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL)
    assert done.returncode == 0
    found = json.loads(verdict.read_text())
    assert found["violations"] == 0 and found["faults"] >= 10
