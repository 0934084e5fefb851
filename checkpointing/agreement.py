"""One tiny all-reduce per step by which all ranks act at the same step number.

Nothing that changes the course of training is decided by one rank. Each step starts an asynchronous maximum of every
rank's flags on a gloo group of its own (never the gradients' group) and reads the result of the step before: by then
it has arrived, so nobody waits for it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist


class Flag(IntEnum):
    """What a rank may ask all ranks to do; the position in the reduced vector."""

    STOP = 0
    SAVE = 1
    SNAPSHOT = 2


class Agreement:
    """Used by every rank, in lock-step, from the thread that trains. `group` is None for a single process."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._pending: tuple[Any, torch.Tensor] | None = None

    def exchange(self, flags: set[Flag]) -> set[Flag]:
        """Tell this rank's flags; returns those that any rank told at the previous call."""
        agreed = self.drain()
        vector = torch.tensor([int(flag in flags) for flag in Flag], dtype=torch.int32)
        work = None
        if self._group is not None:
            work = dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (work, vector)
        return agreed

    def drain(self) -> set[Flag]:
        """Wait for the last exchange and return what was agreed in it; nothing is in flight afterwards."""
        if self._pending is None:
            return set()
        work, vector = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        return {flag for flag, asked in zip(Flag, vector.tolist(), strict=True) if asked}
