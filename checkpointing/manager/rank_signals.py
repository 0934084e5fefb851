"""A rank's handlers of signals: those for preemption notices set a flag, that for a save (SIGUSR2) counts, no more.

The flag is read at the next step boundary, where all ranks agree to stop. While there is no reader (during imports, or
in a script that does not use these checkpoints), a signal has its usual effect. A handler that the script sets later
stands behind ours: both are called.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Under a supervisor, Ctrl-C is a stop request to the supervisor, also where it reaches one rank only.
_SUPERVISED_SIGNALS = (*SIGNALS, signal.SIGINT)

_requested = False
_num_saves = 0
_num_readers = 0
_report: Callable[[], None] | None = None
_owner: int | None = None
# Those that this process handles.
_numbers: tuple[signal.Signals, ...] = ()


class _Chained:
    """Our handler, in front of one that the script has set since."""

    def __init__(self, theirs: Callable[[int, Any], Any]) -> None:
        self._theirs = theirs

    def __call__(self, number: int, frame: Any) -> None:
        is_read = _note()
        try:
            self._theirs(number, frame)
        except SystemExit:
            # All ranks end at the next step boundary, with the step saved and a status that says so.
            if not is_read:
                raise


def install(report: Callable[[], None] | None = None) -> None:
    """Handle the signals in this process from now on; does nothing outside its main thread.

    Args:
        report: Called at each signal, so that a supervisor learns of one that was sent to this rank only.
    """
    global _report, _owner, _numbers
    if threading.current_thread() is not threading.main_thread():
        return
    _report = report or _report
    if _owner == os.getpid():
        _stay_in_front()
        return
    _owner, _numbers = os.getpid(), _SUPERVISED_SIGNALS if report is not None else SIGNALS
    for number in _numbers:
        with contextlib.suppress(OSError):
            signal.signal(number, _on_signal)
    # What the script does with it already stays.
    if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, _on_save)


def _stay_in_front() -> None:
    """Put our handler in front of those that the script has set since."""
    if _owner != os.getpid() or threading.current_thread() is not threading.main_thread():
        return
    for number in _numbers:
        handler = signal.getsignal(number)
        # Python's own for Ctrl-C is no script's, and what ignores a signal is no handler.
        if not callable(handler) or handler in (_on_signal, signal.default_int_handler):
            continue
        if not isinstance(handler, _Chained):
            signal.signal(number, _Chained(handler))


def begin_reading() -> None:
    """Count a reader, which calls `requested` at every step from now on."""
    global _num_readers
    install()
    _num_readers += 1


def end_reading(*, stopped: bool = False) -> None:
    """Count a reader less.

    Args:
        stopped: This process is ending because of a signal; further signals must not end it in another way.
    """
    global _num_readers
    if not stopped:
        _num_readers -= 1


def requested() -> bool:
    """Return whether a signal was received."""
    _stay_in_front()
    return _requested


def num_saves() -> int:
    """Return how often a checkpoint was asked for by SIGUSR2."""
    return _num_saves


def _on_save(number: int, _: object) -> None:
    global _num_saves
    _num_saves += 1


def _note() -> bool:
    """Note a signal to this process; return whether somebody will act on it."""
    global _requested
    if os.getpid() != _owner:
        return False
    _requested = True
    if _report is not None:
        _report()
    return _num_readers > 0


def _on_signal(number: int, _: object) -> None:
    if _note():
        return
    # In a child that was forked with the handler, such as a DataLoader worker, its parent handles the notice.
    if os.getpid() == _owner or number == signal.SIGTERM:
        # There is no reader to act on the flag.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
