"""A wire that is cut in silence is noticed on both sides, soon; a machine under load is not taken for one.

SILENCE_MINUTES=60 pytest -s -m soak tests/integration/test_peer_silence.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.wire import Cut
from infra.ports import free_port

from runner.chaos.network import address_of, inside
from runner.peers.connection import SILENCE_S

PROGRAM = Path(__file__).with_name("peer_program.py")
MINUTES = float(os.environ.get("SILENCE_MINUTES", "5"))


def start(role: str, host: str, port: int, seconds: float, on: int | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", str(PROGRAM), role, host, str(port), str(seconds)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        inside(on, command) if on is not None else command, stdout=subprocess.PIPE, text=True, env=environment
    )


def next_change(process: subprocess.Popen[str]) -> tuple[str, float]:
    assert process.stdout is not None
    change, when = process.stdout.readline().split()
    return change, float(when)


def test_both_sides_notice_a_cut(cut: Cut) -> None:
    sides = [start(role, address_of(0), 29777, 60, number) for number, role in enumerate(("leader", "member"))]
    assert [next_change(side)[0] for side in sides] == ["connected", "connected"]
    cut.now()
    cut_at = time.monotonic()
    for side in sides:
        change, lost_at = next_change(side)
        print(f"noticed after {lost_at - cut_at:.1f} s")
        assert change == "lost" and lost_at - cut_at < SILENCE_S, "its kernel was not asked"
    cut.restore()
    assert [next_change(side)[0] for side in sides] == ["connected", "connected"]
    for side in sides:
        side.kill()
        side.wait()


@pytest.mark.soak
@pytest.mark.timeout(60 * MINUTES + 120)
def test_a_machine_under_load_is_not_silent() -> None:
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: bytearray(1 << 26)"])
        for _ in range(4 * (os.cpu_count() or 1))
    ]
    try:
        port = free_port()
        sides = [start(role, "127.0.0.1", port, 60 * MINUTES) for role in ("leader", "member")]
        found = [side.communicate()[0].split()[::2] for side in sides]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert found == [["connected"], ["connected"]]
