"""One thread waits for everything: sockets, deaths, signals, other threads. Handlers run here, one after the other."""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runner.system.processes import STOP_SIGNALS


class StopRequest:
    """Whether, why and how urgently the run was asked to stop. Signal handlers only count here.

    One notice may arrive by several ways: a scheduler signals the ranks as well, and the other machines' runners. Only
    signals to this process count as the user's or the scheduler's second word.
    """

    def __init__(self) -> None:
        self.reason = ""
        # Monotonic seconds; from here on the grace counts.
        self.asked_at = 0.0
        self._signals = 0
        self._hurried_at: float | None = None

    def ask(self, reason: str) -> None:
        """End in good order; what comes after the first request changes nothing."""
        if not self.reason:
            self.asked_at = time.monotonic()
            self.reason = reason

    def __bool__(self) -> bool:
        return bool(self.reason)

    @property
    def at_once(self) -> bool:
        """Signalled twice."""
        return self._signals > 1

    def over_at(self, grace_s: float) -> float:
        """Monotonic seconds at which whoever asked will wait no longer."""
        return self.asked_at + grace_s if self._hurried_at is None else self._hurried_at

    def count_signals(self) -> None:
        """Have stop signals counted from now on, and do nothing else."""

        def count(number: int, _: object) -> None:
            self._signals += 1
            if self._signals > 1 and self._hurried_at is None:
                self._hurried_at = time.monotonic()
            self.ask(signal.Signals(number).name)

        def ignore() -> None:
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)

        for number in STOP_SIGNALS:
            signal.signal(number, count)
        # The interpreter's own end takes handlers back: a signal that comes then would take the exit code's place.
        atexit.register(ignore)


@dataclass
class _Timer:
    interval_s: float
    handler: Callable[[], None]
    due: float = 0.0


class EventLoop:
    """Calls handlers for what is ready; every wait goes through it, so that all of them can be interrupted."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[_Timer] = []
        self._receiver, self._sender = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.register(self._receiver, self._woken)

    def register(self, file: Any, handler: Callable[[Any], None]) -> None:
        """Call `handler` with the file whenever it can be read."""
        self._selector.register(file, selectors.EVENT_READ, handler)

    def unregister(self, file: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def wake_by_signals(self) -> None:
        """Have every signal that is handled end the wait."""
        signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)

    def every(self, interval_s: float, handler: Callable[[], None]) -> None:
        """Call it about so often, whatever the loop is waiting for."""
        self._timers.append(_Timer(interval_s, handler))

    def call(self, handler: Callable[[], None]) -> None:
        """Have it called in the loop's thread; from any thread."""
        self._calls.append(handler)
        with contextlib.suppress(BlockingIOError):
            os.write(self._sender, b"c")

    def pump(self, timeout_s: float) -> None:
        """Handle what has happened, waiting at most `timeout_s` for it."""
        for key, _ in self._selector.select(max(timeout_s, 0.0)):
            # An earlier handler of this turn may have closed it.
            if key.fileobj in self._selector.get_map():
                key.data(key.fileobj)
        now = time.monotonic()
        for timer in self._timers:
            if now >= timer.due:
                timer.due = now + timer.interval_s
                timer.handler()

    def pump_until(self, done: Callable[[], bool], deadline: float, turn_s: float = 0.1) -> bool:
        """Handle what happens until something holds, or until `deadline` (monotonic); returns whether it holds."""
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.pump(min(left, turn_s))
        return True

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        self._selector.close()
        os.close(self._receiver)
        os.close(self._sender)

    def _woken(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(fd, 4096)
        while self._calls:
            self._calls.popleft()()
