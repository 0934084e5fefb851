"""What `ps` shows for a rank that a supervisor has started: `resilient: rank 1 of 2, step 40: train.py --lr 3`.

By setproctitle, where that is installed. It may write over the arguments only (SPT_NOENV): the environment behind them
says to which run a process belongs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

_EVERY_S = 1.0

_show: Callable[[str], None] | None = None
_shown_at = 0.0


def name_this_process(name: str, command: str = "", after: Callable[[], None] = lambda: None) -> None:
    """Show a name for this process from now on.

    Args:
        name: What it is.
        command: What it runs, shown behind the name and the newest step, as far as there is room.
        after: Called after each change: what `ps -o comm` shows changes with it.
    """
    global _show, _shown_at
    try:
        from setproctitle import setproctitle
    except ImportError:
        return

    def show(step: str) -> None:
        setproctitle(f"resilient: {name}{step}{f': {command}' if command else ''}")
        after()

    # Read at the first call of a process; what it starts is not concerned.
    before = os.environ.get("SPT_NOENV")
    os.environ["SPT_NOENV"] = "1"
    show("")
    if before is None:
        del os.environ["SPT_NOENV"]
    _show, _shown_at = show, 0.0


def show_step(step: int) -> None:
    """Show the newest step, about once a second."""
    global _shown_at
    if _show is not None and (now := time.monotonic()) - _shown_at >= _EVERY_S:
        _shown_at = now
        _show(f", step {step}")
