"""A tiny all-reduce by which all ranks act at the same step number.

Nothing that changes the course of training is decided by one rank. An asynchronous maximum of every rank's flags is
started at a step's end, on a gloo group of its own (never the gradients' group), and read at the end of the next one:
by then it has arrived, so nobody waits for it. Where steps are short it is not started at each: rank 0 proposes how
many to leave out, and what it proposes is agreed with the flags, so that all ranks leave out the same.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist


class Flag(IntEnum):
    """What a rank may ask all ranks to do; the position in the reduced vector."""

    STOP = 0
    SAVE = 1
    SNAPSHOT = 2
    # Of the oldest save that callbacks wait for: it is committed, or will not be.
    COMMITTED = 3
    NOT_COMMITTED = 4


class Agreement:
    """Used by every rank, in lock-step, from the thread that trains. `group` is None for a single process."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self._vector = torch.zeros(len(Flag) + 1, dtype=torch.int32)
        self._values = self._vector.numpy()
        self._work: Any = None
        self._in_flight = False
        # Calls that are to be left out, as all ranks have agreed.
        self._num_left_out = 0

    def exchange(self, ask: Callable[[], tuple[set[Flag], int]], *, now: bool = False) -> set[Flag]:
        """Tell what this rank asks for, if that is due; returns the flags that were agreed on since the last call.

        A flag must be asked for again until it is agreed on.

        Args:
            ask: called only where it is due: this rank's flags, and how many calls from this exchange to the next it
                proposes; the largest proposal counts.
            now: exchange at this call, whatever was agreed; all ranks must say the same.
        """
        agreed = self.drain()
        if self._num_left_out > 0 and not now:
            self._num_left_out -= 1
            return agreed
        flags, interval = ask()
        self._values[:] = [*(int(flag in flags) for flag in Flag), interval]
        if self._group is not None:
            # Not by `dist.all_reduce`: what that checks takes longer than the exchange.
            self._work = self._group.allreduce([self._vector], self._options)
        self._in_flight = True
        return agreed

    def drain(self) -> set[Flag]:
        """Wait for the last exchange and return what was agreed in it; nothing is in flight afterwards."""
        if not self._in_flight:
            return set()
        self._in_flight = False
        if self._work is not None:
            self._work.wait()
            self._work = None
        *asked, interval = self._values.tolist()
        self._num_left_out = interval - 1
        return {flag for flag, count in zip(Flag, asked, strict=True) if count}
