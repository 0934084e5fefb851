"""A rank's answer to preemption notices: from its first moment on they set a flag, and nothing else.

The flag is read at the next step boundary, where all ranks agree to stop. As long as nobody reads it (imports, a script
that does not use these checkpoints), a signal does what it would do without us.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Under a supervisor, Ctrl-C is the supervisor's to answer, and so is one that reaches a rank alone.
_SUPERVISED_SIGNALS = (*SIGNALS, signal.SIGINT)

_requested = False
_num_readers = 0
_tell: Callable[[], None] | None = None
_owner: int | None = None


def install(tell: Callable[[], None] | None = None) -> None:
    """Answer the signals from now on, in this process; a no-op outside its main thread.

    Args:
        tell: called at each signal, so that a supervisor learns of one that was sent to this rank alone.
    """
    global _tell, _owner
    if threading.current_thread() is not threading.main_thread():
        return
    _tell = tell or _tell
    if _owner == os.getpid():
        return
    _owner = os.getpid()
    for number in _SUPERVISED_SIGNALS if tell is not None else SIGNALS:
        with contextlib.suppress(OSError):
            signal.signal(number, _on_signal)


def begin_reading() -> None:
    """Say that `requested` is asked at every step from now on."""
    global _num_readers
    install()
    _num_readers += 1


def end_reading(*, stopped: bool = False) -> None:
    """Say that nobody asks any more; `stopped`: because this process ends in answer to a signal, which it does once."""
    global _num_readers
    if not stopped:
        _num_readers -= 1


def requested() -> bool:
    """Whether a signal has come."""
    return _requested


def _on_signal(number: int, _: object) -> None:
    global _requested
    if os.getpid() == _owner:
        _requested = True
        if _tell is not None:
            _tell()
        if _num_readers > 0:
            return
    elif number != signal.SIGTERM:
        # A child that was forked with the handler, a worker of a DataLoader's: a notice is its parent's to answer.
        return
    # Nobody would act on it.
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
