"""The clock that the processes of one machine share."""

from __future__ import annotations

import time


def machine_clock() -> float:
    """Return the seconds since this machine was booted: the same in all processes, whatever the wall clock does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
