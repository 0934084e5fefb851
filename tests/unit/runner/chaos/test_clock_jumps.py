"""A wall clock that jumps for one process, whose sleeps and time-outs do not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from infra.parts import lacks

from runner.chaos.clock_jumps import Clock

PROCESS = """
import datetime, multiprocessing, sys, threading, time
for line in sys.stdin:
    began = time.monotonic()
    time.sleep(0.05)
    threading.Event().wait(0.05)
    multiprocessing.Semaphore(0).acquire(timeout=0.05)
    print(time.time(), datetime.datetime.now().timestamp(), time.monotonic() - began, flush=True)
"""


def test_it_jumps_and_nothing_else_does(tmp_path: Path) -> None:
    try:
        clock = Clock(tmp_path)
    except OSError as error:
        lacks("C compiler", error)
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **clock.environment},
    )
    assert process.stdin is not None and process.stdout is not None
    for seconds in (0, 3600, -3600, 0):
        clock.set(seconds)
        before = time.time()
        process.stdin.write("\n")
        process.stdin.flush()
        now, today, waited = map(float, process.stdout.readline().split())
        assert before <= now - seconds <= time.time() and before <= today - seconds <= time.time()
        # The jump is an hour.
        assert 0.15 <= waited < 600
    process.stdin.close()
    assert process.wait(120) == 0
