"""What ranks and the launcher tell each other when a rank is killed in mid-sentence."""

from __future__ import annotations

import multiprocessing
import socket
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


def test_a_store_is_waited_for_until_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tries at once, and then most of a second later."""
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))
        port, slept = late.getsockname()[1], list[float]()

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 3:
                late.listen()

        monkeypatch.setattr(time, "sleep", sleep)
        launcher._await_store(f"127.0.0.1:{port}")
        assert slept == [0.02] * 3


def test_a_store_that_never_listens_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    with socket.socket() as never:
        never.bind(("127.0.0.1", 0))
        launcher._await_store(f"[127.0.0.1]:{never.getsockname()[1]}")
    assert 1.0 <= now[0] < 1.1


def test_an_endpoint_without_a_port_is_left_to_torch() -> None:
    launcher._await_store("node0")
