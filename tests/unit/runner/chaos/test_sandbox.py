"""A wall clock that jumps for one process, and a memory cgroup whose limit is lowered under one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from infra.parts import lacks

from runner.chaos.sandbox import Clock, MemoryGroup

WAITING = """
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
        [sys.executable, "-c", WAITING],
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


# Takes 64 MiB more with each line.
GREEDY = """
import sys
taken = []
print("ready", flush=True)
for line in sys.stdin:
    taken.append(bytearray(b"x") * (64 << 20))
    print("taken", flush=True)
"""


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    try:
        group = MemoryGroup()
    except OSError as error:
        lacks("memory cgroup", error)
    yield group
    group.close()


def test_who_needs_more_is_ended_and_only_while_the_limit_stands(group: MemoryGroup) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GREEDY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        keys, words = process.stdin, process.stdout
        assert keys is not None and words is not None
        group.enter(process.pid)

        def take() -> str:
            keys.write("\n")
            keys.flush()
            return words.readline().strip()

        assert words.readline().strip() == "ready"
        with group.limited(256 << 20):
            assert take() == "taken"
        with group.limited(256 << 20):
            assert [take() for _ in range(2)] == ["taken", "taken"]
        assert take() == "taken" and group.num_kills == 0
        with group.limited(0):
            assert take() == ""
        assert group.num_kills == 1 and process.wait(120) == -9
