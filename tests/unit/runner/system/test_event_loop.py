"""What counts as a request to stop, and as the second one, that leaves no time; which handlers are called."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator

import pytest

from runner.system.event_loop import EventLoop, StopRequest
from runner.system.processes import STOP_SIGNALS


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    # Under nohup it is ignored, and stays so.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    stop = StopRequest()
    stop.count_signals()
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("first", "second", "apart_s", "at_once"),
    [
        (signal.SIGINT, signal.SIGINT, 0.1, True),
        (signal.SIGTERM, signal.SIGTERM, 60.0, True),
        (signal.SIGUSR1, signal.SIGTERM, 60.0, True),
        # As systemd ends a session, and as a terminal and its shell do.
        (signal.SIGTERM, signal.SIGHUP, 0.0, False),
        (signal.SIGHUP, signal.SIGHUP, 0.1, False),
        (signal.SIGHUP, signal.SIGHUP, 60.0, True),
    ],
)
def test_two_signals_leave_no_time_unless_they_are_one_notice(
    first: signal.Signals,
    second: signal.Signals,
    apart_s: float,
    at_once: bool,
    stop: StopRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("runner.system.event_loop.time.monotonic", lambda: now)
    assert not stop
    signal.raise_signal(first)
    assert stop and not stop.at_once and stop.over_at(25.0) == 125.0
    now += apart_s
    signal.raise_signal(second)
    assert stop.at_once is at_once and stop.reason == first.name
    assert stop.over_at(25.0) == (now if at_once else 125.0)


def test_what_nohup_ignores_stays_ignored() -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopRequest()
    stop.count_signals()
    signal.raise_signal(signal.SIGHUP)
    assert not stop
    signal.raise_signal(signal.SIGTERM)
    assert stop.reason == "SIGTERM"
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("signal_first", [True, False])
def test_one_notice_by_two_ways_is_one(signal_first: bool, stop: StopRequest) -> None:
    """Slurm signals every task: another machine's runner, or a rank, may tell of it before our own signal comes."""
    ways: list[Callable[[], None]] = [
        lambda: signal.raise_signal(signal.SIGUSR1),
        lambda: stop.ask("machine 1: SIGUSR1"),
    ]
    for way in ways if signal_first else reversed(ways):
        way()
    assert stop and not stop.at_once
    stop.ask("a signal to rank 0")
    assert not stop.at_once
    signal.raise_signal(signal.SIGUSR1)
    assert stop.at_once


@pytest.mark.parametrize("closes", [True, False])
def test_a_file_that_an_earlier_handler_has_given_up_is_left_alone(closes: bool) -> None:
    """Both are ready in the same turn, as when a node's new connection replaces its old one."""
    loop, pairs = EventLoop(), [socket.socketpair() for _ in range(2)]
    handled = []

    def handle(file: socket.socket) -> None:
        handled.append(file)
        for reader, _ in pairs:
            if reader is not file:
                loop.unregister(reader)
                if closes:
                    reader.close()

    for reader, writer in pairs:
        loop.register(reader, handle)
        writer.send(b"x")
    loop.pump(1)
    assert len(handled) == 1
    loop.close()
    for sock in (sock for pair in pairs for sock in pair):
        sock.close()


def test_a_number_that_another_file_has_got_is_not_the_earlier_ones() -> None:
    """Neither file's handler is called for what the other's has put in its place."""
    loop, pipes, idle = EventLoop(), [os.pipe() for _ in range(2)], os.pipe()
    handled = []

    def handle(fd: int) -> None:
        handled.append("old")
        (other,) = (reader for reader, _ in pipes if reader != fd)
        loop.unregister(other)
        os.dup2(idle[0], other)
        loop.register(other, lambda fd: handled.append("new"))

    for reader, writer in pipes:
        loop.register(reader, handle)
        os.write(writer, b"x")
    loop.pump(1)
    assert handled == ["old"]
    loop.close()
    for fd in (fd for pipe in (*pipes, idle) for fd in pipe):
        os.close(fd)
