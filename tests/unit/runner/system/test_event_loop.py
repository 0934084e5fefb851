"""What counts as a request to stop, and as the second one, that leaves no time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from runner.system.event_loop import StopRequest
from runner.system.processes import STOP_SIGNALS


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    stop = StopRequest()
    stop.count_signals()
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


def test_two_signals_leave_no_time(stop: StopRequest) -> None:
    assert not stop
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop and not stop.at_once
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.at_once and stop.reason == "SIGUSR1"


@pytest.mark.parametrize("signal_first", [True, False])
def test_one_notice_by_two_ways_is_one(signal_first: bool, stop: StopRequest) -> None:
    """Slurm signals every task: another machine's runner, or a rank, may tell of it before our own signal comes."""
    ways: list[Callable[[], None]] = [
        lambda: os.kill(os.getpid(), signal.SIGUSR1),
        lambda: stop.ask("machine 1: SIGUSR1"),
    ]
    for way in ways if signal_first else reversed(ways):
        way()
    assert stop and not stop.at_once
    stop.ask("a signal to rank 0")
    assert not stop.at_once
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.at_once
