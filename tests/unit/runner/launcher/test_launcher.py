"""What ranks and the launcher tell each other when a rank is killed in mid-sentence."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from runner.launcher.launcher import Signal


def reads(pid: int | None) -> bool:
    """It waits for a byte of a pipe."""
    return "pipe_read" in Path(f"/proc/{pid}/wchan").read_text()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_signal_does_not_wait_for_who_was_killed(method: Any) -> None:
    context, signal = multiprocessing.get_context(method), Signal()
    waiting = [context.Process(target=signal.wait) for _ in range(2)]
    for process in waiting:
        process.start()
    deadline = time.monotonic() + 120
    while not all(reads(process.pid) for process in waiting):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    waiting[0].kill()
    given = threading.Thread(target=signal.set, daemon=True)
    given.start()
    given.join(120)
    assert not given.is_alive()
    waiting[1].join(120)
    assert waiting[1].exitcode == 0
