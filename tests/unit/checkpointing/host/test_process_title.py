"""What ps shows, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

NAMED = """
import os, sys, time
from pathlib import Path
from checkpointing.host import process_title
calls = []
process_title.name_this_process("rank 1 of 2", "train.py", lambda: calls.append(1))
process_title.show_step(40)
process_title.show_step(41)
print(Path("/proc/self/cmdline").read_text().rstrip(chr(0)))
print("MARK=here" in Path("/proc/self/environ").read_text().split(chr(0)), "SPT_NOENV" in os.environ, len(calls))
"""


def run(script: str) -> list[str]:
    # There is as much room as the arguments had.
    command = [sys.executable, "-c", script, "x" * 100]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, env={**os.environ, "MARK": "here"}
    )
    return done.stdout.splitlines()


def test_the_name_has_the_newest_step_and_the_environment_stays() -> None:
    assert run(NAMED) == ["resilient: rank 1 of 2, step 40: train.py", "True False 2"]


def test_without_the_package_nothing_changes() -> None:
    shown, rest = run("import sys\nsys.modules['setproctitle'] = None\n" + NAMED)[-2:]
    assert "resilient" not in shown.split("\n")[0][:10] and rest == "True False 0"
