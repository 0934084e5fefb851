"""An event loop in one thread for sockets, process exits, signals and other threads.

Handlers run in that thread, one after the other.
"""

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

# systemd sends SIGTERM and then SIGHUP; a terminal that closes sends SIGHUP, and so does its shell.
_ONE_NOTICE_S = 2.0
# Between two looks at a condition if nothing happens.
_TURN_S = 0.1


class StopRequest:
    """Whether, why and how urgently the run was asked to stop. Signal handlers only count.

    One notice may arrive in several ways, because a scheduler signals the ranks and the runners of other nodes as well.
    Only signals to this process count as the second request, which leaves no time: the same signal again, as when a
    user presses Ctrl-C twice, or another one some seconds later.

    Attributes:
        reason: Why the run was asked to stop; empty if it was not.
        asked_at: Monotonic seconds of the first request, when the grace period begins.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.asked_at = 0.0
        # The first signal, and its monotonic seconds.
        self._signal: tuple[int, float] | None = None
        self._hurried_at: float | None = None

    def ask(self, reason: str) -> None:
        """Request an orderly stop. Requests after the first one change nothing."""
        if not self.reason:
            self.asked_at = time.monotonic()
            self.reason = reason

    def __bool__(self) -> bool:
        return bool(self.reason)

    @property
    def at_once(self) -> bool:
        """Whether a second signal asked to stop without delay."""
        return self._hurried_at is not None

    def over_at(self, grace_s: float) -> float:
        """Return the monotonic seconds at which a grace period of so many seconds ends."""
        return self.asked_at + grace_s if self._hurried_at is None else self._hurried_at

    def count_signals(self) -> None:
        """Install handlers that only count stop signals, but for SIGHUP where that is ignored (nohup)."""

        def count(number: int, _: object) -> None:
            now = time.monotonic()
            if self._signal is None:
                self._signal = number, now
            elif self._hurried_at is None:
                first, at = self._signal
                is_same_notice = now - at < _ONE_NOTICE_S and (number != first or number == signal.SIGHUP)
                self._hurried_at = None if is_same_notice else now
            self.ask(signal.Signals(number).name)

        # Not SIGINT, which a shell script ignores in whatever it runs in the background.
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        numbers = [number for number in STOP_SIGNALS if number != signal.SIGHUP or not nohup]

        def ignore() -> None:
            for number in (*numbers, signal.SIGUSR2):
                signal.signal(number, signal.SIG_IGN)

        for number in numbers:
            signal.signal(number, count)
        # A request to save (`runner.session.requests`) ends nothing, however early it comes.
        signal.signal(signal.SIGUSR2, lambda *_: None)
        # The interpreter restores default handlers at its exit, when a signal would replace the exit code.
        atexit.register(ignore)


@dataclass
class _Timer:
    interval_s: float
    handler: Callable[[], None]
    due: float = 0.0


class EventLoop:
    """Calls handlers of files, timers and calls. Every wait goes through it, so that all can be interrupted."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[_Timer] = []
        self._receiver, self._sender = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.register(self._receiver, self._woken)

    def register(self, file: Any, handler: Callable[[Any], None]) -> None:
        """Call `handler` with the file whenever it is readable."""
        self._selector.register(file, selectors.EVENT_READ, handler)

    def unregister(self, file: Any) -> None:
        """Remove the handler of a file, if there is one."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def wake_by_signals(self) -> None:
        """Let every handled signal interrupt the wait."""
        signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)

    def every(self, interval_s: float, handler: Callable[[], None]) -> None:
        """Call `handler` about every `interval_s` seconds."""
        self._timers.append(_Timer(interval_s, handler))

    def call(self, handler: Callable[[], None]) -> None:
        """Call `handler` in the loop's thread. May be called from any thread."""
        self._calls.append(handler)
        with contextlib.suppress(BlockingIOError):
            os.write(self._sender, b"c")

    def pump(self, timeout_s: float) -> None:
        """Handle what is ready, after waiting for it at most `timeout_s` seconds."""
        for key, _ in self._selector.select(max(timeout_s, 0.0)):
            if self._is_current(key):
                key.data(key.fileobj)
        now = time.monotonic()
        for timer in self._timers:
            if now >= timer.due:
                timer.due = now + timer.interval_s
                timer.handler()

    def _is_current(self, key: selectors.SelectorKey) -> bool:
        """Return whether no earlier handler of this turn has given up the file, or replaced it."""
        try:
            return self._selector.get_key(key.fileobj) == key
        except (KeyError, ValueError):
            return False

    def pump_until(self, done: Callable[[], bool], deadline: float) -> bool:
        """Handle events until a condition holds; False if it does not at the deadline, in monotonic seconds."""
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.pump(min(left, _TURN_S))
        return True

    def close(self) -> None:
        """Release the loop's files."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        os.close(self._receiver)
        os.close(self._sender)

    def _woken(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(fd, 4096)
        while self._calls:
            self._calls.popleft()()
