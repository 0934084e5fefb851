"""A rank's handlers for preemption notices: they set a flag, and nothing else.

The flag is read at the next step boundary, where all ranks agree to stop. While there is no reader (during imports, or
in a script that does not use these checkpoints), a signal has its usual effect.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Under a supervisor, Ctrl-C is a stop request to the supervisor, also where it reaches one rank only.
_SUPERVISED_SIGNALS = (*SIGNALS, signal.SIGINT)

_requested = False
_num_readers = 0
_report: Callable[[], None] | None = None
_owner: int | None = None


def install(report: Callable[[], None] | None = None) -> None:
    """Handle the signals in this process from now on; does nothing outside its main thread.

    Args:
        report: Called at each signal, so that a supervisor learns of one that was sent to this rank only.
    """
    global _report, _owner
    if threading.current_thread() is not threading.main_thread():
        return
    _report = report or _report
    if _owner == os.getpid():
        return
    _owner = os.getpid()
    for number in _SUPERVISED_SIGNALS if report is not None else SIGNALS:
        with contextlib.suppress(OSError):
            signal.signal(number, _on_signal)


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
    return _requested


def _on_signal(number: int, _: object) -> None:
    global _requested
    if os.getpid() == _owner:
        _requested = True
        if _report is not None:
            _report()
        if _num_readers > 0:
            return
    elif number != signal.SIGTERM:
        # A child that was forked with the handler, such as a DataLoader worker: its parent handles the notice.
        return
    # There is no reader to act on the flag.
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
