"""What ranks and the launcher tell each other when a rank is killed in mid-sentence."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from runner.node import launcher
from runner.node.launcher import Signal


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


@pytest.mark.parametrize(("nnodes", "seconds"), [(1, 0.02), (3, 0.02), (100, 0.2), (5000, 1.0)])
def test_nodes_look_for_each_other_often_but_do_not_flood_the_store(
    nnodes: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's nodes looked once a second, which was most of a recovery on several nodes."""
    rendezvous: Any = dynamic_rendezvous
    holder = rendezvous._BackendRendezvousStateHolder
    before = holder.__init__.__defaults__
    monkeypatch.setattr(rendezvous, "_delay", rendezvous._delay)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    try:
        launcher._meet_at_once(nnodes)
        rendezvous._delay(seconds=1)
        rendezvous._delay(seconds=(0, 0.3))
        # What was seen a moment ago is asked for again.
        assert holder(None, None)._cache_duration == 0
    finally:
        holder.__init__.__defaults__ = before
    assert slept == pytest.approx([seconds, seconds])
