"""A tiny all-reduce by which all ranks act at the same step number.

No rank alone decides anything that changes the course of training. At the end of a step, an asynchronous maximum over
every rank's flags is started on a gloo group of its own (never the gradients' group); it is read at the end of the next
step. By then it has arrived, so no rank waits for it. Where steps are short, it is not started at each step: rank 0
proposes how many calls to leave out, and the proposal is agreed together with the flags, so that all ranks leave out
the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist


class Flag(IntEnum):
    """What a rank may ask all ranks to do; the value is the position in the reduced vector."""

    STOP = 0
    SAVE = 1
    SNAPSHOT = 2
    # About the oldest save that callbacks wait for: it is committed, or will not be.
    COMMITTED = 3
    NOT_COMMITTED = 4


class FlagSync:
    """Synchronises flags; every rank calls it in lock-step, from the thread that trains.

    Args:
        group: A gloo group that nothing else uses; None for a single process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self._vector = torch.zeros(len(Flag) + 1, dtype=torch.int32)
        self._values = self._vector.numpy()
        self._work: Any = None
        self._in_flight = False
        # Calls to leave out, as all ranks have agreed.
        self._num_left_out = 0

    def exchange(self, ask: Callable[[], tuple[set[Flag], int]], *, now: bool = False) -> set[Flag]:
        """Send this rank's flags, where that is due; return the flags agreed on since the last call.

        A rank must ask for a flag again until it is agreed on.

        Args:
            ask: Called only where an exchange is due. Returns this rank's flags, and the number of calls that it
                proposes from this exchange to the next; the largest proposal counts.
            now: Exchange at this call, whatever was agreed; all ranks must pass the same value.
        """
        agreed = self.drain()
        if self._num_left_out > 0 and not now:
            self._num_left_out -= 1
            return agreed
        flags, interval = ask()
        self._values[:] = [*(int(flag in flags) for flag in Flag), interval]
        if self._group is not None:
            # Not `dist.all_reduce`: its checks take longer than the exchange.
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
