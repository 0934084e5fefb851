"""Aim's repository is made whole, or not at all."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from infra.parts import require

OPEN = """
import os, signal, sys
from aim.sdk.repo import DB
from runner.training.tracking import AimTracker
if sys.argv[2] == "killed":
    DB.run_upgrades = lambda self: os.kill(os.getpid(), signal.SIGKILL)
run = AimTracker(sys.argv[1], "e", "somewhere")._open()
run.track(1.0, name="loss", step=1)
run.close()
"""


def test_a_rank_killed_while_it_makes_the_repository(tmp_path: Path) -> None:
    """It was half made for ever: every later attempt said that it cannot be used."""
    require("Aim")
    repo = tmp_path / "aim"

    def opened(how: str) -> int:
        command = [sys.executable, "-c", OPEN, str(repo), how]
        return subprocess.run(command, timeout=300).returncode

    assert opened("killed") == -signal.SIGKILL and not (repo / ".aim").exists()
    assert opened("well") == 0 and (repo / ".aim" / "VERSION").exists()
    assert opened("well") == 0
    assert [path.name for path in repo.iterdir()] == [".aim"], "nothing of the first one is left"
