"""Finds ranks that are slower than the others.

In data-parallel training all ranks wait for the slowest one, so the duration of a step says nothing about any of them.
What a rank does without the others is timed: its forward passes, and the time from the end of a step to the first
forward pass of the next one, in which it draws its data. All ranks compare these now and then.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from checkpointing.agent.events import SlowRanks
from checkpointing.files.sharding import has_sharded
from checkpointing.process import device
from checkpointing.process.device import DeviceMark
from checkpointing.process.ranks import Ranks

# A moment of the device, or in seconds of the host where that computes.
_Moment = DeviceMark | float
_Span = tuple[_Moment, _Moment]

WINDOW_STEPS = 50
# Against the median rank. Below the second limit, in seconds per step, nobody would notice.
_SLOW_RATIO = 1.3
_LEAST_EXCESS_S = 0.005


def slow_ranks(seconds: Sequence[float]) -> dict[int, float]:
    """Return the ranks that need at least 1.3 times as long as the median rank, with this ratio.

    Of two ranks, or two groups of equal size, the faster one is the median.

    Args:
        seconds: Seconds per step that each rank computes by itself; 0 where that is unknown.
    """
    median = statistics.median_low([value for value in seconds if value > 0] or [0.0])
    return {
        rank: round(value / median, 2)
        for rank, value in enumerate(seconds)
        if median > 0 and value >= _SLOW_RATIO * median and value - median >= _LEAST_EXCESS_S
    }


class OwnTime(NamedTuple):
    """Seconds per step that a rank needs by itself; 0 where that is unknown."""

    forward: float
    # With the time between two steps, in which it draws its data.
    whole: float


class StepTimer:
    """Times what a rank does by itself in a step; on an accelerator by its own clock, without waiting for it.

    Passes without gradients do not count. A compiled model, or one that a CUDA graph records, is not timed: the graph
    must not contain the timer.

    Args:
        model: The model, without a DDP wrapper, whose forward passes wait for other ranks.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._device = device.of(model.parameters())
        self._began: _Moment | None = None
        # The end of the step before, and what lies between that and the first forward pass.
        self._ended: _Moment | None = None
        self._between: _Span | None = None
        self._passes: list[_Span] = []
        self._steps: list[tuple[list[_Span], _Span | None]] = []
        self._hooks = [
            model.register_forward_pre_hook(self._before),
            model.register_forward_hook(self._after),
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        # Hooks are copied, and pickled, with their model. A copy of it is not timed.
        return StepTimer, (torch.nn.Module(),)

    def drawn(self) -> None:
        """Note that a batch was drawn, after which ranks may wait for each other before they compute."""
        if self._ended is not None and not self._passes:
            self._between = self._ended, self._now()

    def end_step(self) -> None:
        """Note that a step has ended."""
        self._steps.append((self._passes, self._between))
        self._passes, self._between, self._ended = [], None, self._now()

    def take(self) -> OwnTime:
        """Return the medians since the last call."""
        steps, self._steps = self._steps, []
        if self._device.is_asynchronous:
            # The device may not have computed the last one yet.
            steps = steps[:-1]
        forward = _median([_total(passes) for passes, _ in steps])
        # There is none before the first step of an attempt.
        between = _median([_total([span]) for _, span in steps if span is not None])
        return OwnTime(forward, forward + between if forward else 0.0)

    def close(self) -> None:
        """Stop timing."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()) or device.is_capturing():
            return
        self._began = self._now()
        if self._ended is not None and not self._passes and self._between is None:
            self._between = self._ended, self._began

    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._began is None:
            return
        began, self._began = self._began, None
        self._passes.append((began, self._now()))

    def _now(self) -> _Moment:
        return self._device.mark() if self._device.is_asynchronous else time.perf_counter()


def _total(spans: Sequence[_Span]) -> float:
    """Return the seconds of a step's spans; 0 if one of them is unknown."""
    seconds = [_between(begin, end) for begin, end in spans]
    return sum(value for value in seconds if value is not None) if None not in seconds else 0.0


def _between(begin: _Moment, end: _Moment) -> float | None:
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float) and isinstance(end, float), "moments of one device are of one kind"
        return end - begin
    return end.seconds_since(begin)


def _median(seconds: Sequence[float]) -> float:
    """Return the median of what is known; 0 if nothing is."""
    return statistics.median([value for value in seconds if value > 0] or [0.0])


class SpeedComparison:
    """Compares all ranks every `WINDOW_STEPS` steps; every rank calls all methods in lock-step.

    Args:
        ranks: This rank, with a group that the calling thread uses.
        timer: Knows how long this rank computes by itself.
        node_rank: Node rank of this rank's node.
        report: Called on rank 0 when the slow ranks are others than before.
    """

    def __init__(self, ranks: Ranks, timer: StepTimer, *, node_rank: int, report: Callable[[SlowRanks], None]) -> None:
        self._ranks, self._timer, self._node_rank, self._report = ranks, timer, node_rank, report
        self._num_steps = 0
        self._pending: Callable[[], list[list[float]]] | None = None
        self._reported: set[int] = set()

    def drawn(self) -> None:
        """See `StepTimer`."""
        self._timer.drawn()

    def end_of_step(self) -> None:
        """Note that a step has ended; the comparison that it begins is reported at the end of the next one."""
        self.drain()
        self._timer.end_step()
        self._num_steps += 1
        if self._num_steps % WINDOW_STEPS == 0:
            self._pending = self._ranks.gather_later([*self._timer.take(), self._node_rank])

    def drain(self) -> None:
        """Wait for the comparison in flight, and report it."""
        if self._pending is None:
            return
        everyone, self._pending = self._pending(), None
        computing = slow_ranks([forward for forward, _, _ in everyone])
        slow = {**slow_ranks([whole for _, whole, _ in everyone]), **computing}
        if self._ranks.is_first and slow.keys() != self._reported:
            found = sorted(slow)
            self._report(
                SlowRanks(
                    ranks=found,
                    ratios=[slow[rank] for rank in found],
                    nodes=[int(everyone[rank][2]) for rank in found],
                    between_steps=[rank for rank in found if rank not in computing],
                )
            )
        self._reported = set(slow)

    def close(self) -> None:
        """Finish the comparison in flight, and stop timing."""
        self.drain()
        self._timer.close()


def compare_speeds(
    model: object, ranks: Ranks, *, node_rank: int, report: Callable[[SlowRanks], None]
) -> SpeedComparison | None:
    """Begin to compare the ranks of a training; None where there is nothing to compare.

    Args:
        model: The model, without a DDP wrapper.
        ranks: See `SpeedComparison`, like the others.
        node_rank: As above.
        report: As above.
    """
    # The forward passes of a sharded model wait for other ranks.
    if ranks.world_size == 1 or not isinstance(model, torch.nn.Module) or has_sharded(model):
        return None
    return SpeedComparison(ranks, StepTimer(model), node_rank=node_rank, report=report)
