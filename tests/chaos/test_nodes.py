"""`runner chaos --nodes 3`: machines that come and go at random, whatever happens to them and to their network.

CHAOS_MINUTES=45 pytest -s -m soak tests/chaos/test_nodes.py          CHAOS_SEED=7 pytest ... draws the same again
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from infra.parts import require

from checkpointing.commit.tiers import open_tiers
from runner.chaos.cluster import Cluster
from runner.chaos.network import Network
from runner.chaos.run_under_test import JobUnderTest
from runner.journal.events import AttemptStarted

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


@pytest.mark.soak
@pytest.mark.timeout(600 + 60 * MINUTES)
def test_a_loaded_machine_gives_no_false_alarm(wire: Network, tmp_path: Path) -> None:
    """Three nodes train next to more busy processes than there are cores; nothing is injected.

    CHAOS_MINUTES=60 makes it an hour.
    """
    location = tmp_path / "volume"
    options = ["--set", f"checkpoint.location={location}", "--set", "trainer.max_steps=1000000"]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        with Cluster(tmp_path, JobUnderTest(options), open_tiers(str(location), None), 3, wire) as cluster:
            assert cluster.wait_for_step(300)
            until, first = time.monotonic() + 60 * MINUTES, cluster.step()
            while time.monotonic() < until:
                time.sleep(1)
                assert len(cluster.alive) == 3, cluster.unexpected_ends()
            attempts = [entry.event for entry in cluster.entries() if isinstance(entry.event, AttemptStarted)]
            assert cluster.step() > first
            # A node that came late was admitted before; afterwards nothing may end the attempt of all three.
            assert [attempt.nnodes for attempt in attempts if attempt.nnodes == 3] == [3], attempts
            assert attempts[-1].nnodes == 3
    finally:
        for process in busy:
            process.kill()
            process.wait()
