"""The clock that processes of one machine tell each other times by."""

from __future__ import annotations

import time


def machine_clock() -> float:
    """Seconds since this machine was started: the same for all its processes, whatever is done to its wall clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
