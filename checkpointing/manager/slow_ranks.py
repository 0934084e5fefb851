"""Finds ranks that compute more slowly than the others.

In data-parallel training all ranks wait for the slowest one, so the duration of a step says nothing about any of them.
What a rank does without the others are its forward passes: they are timed, and all ranks compare them now and then.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from checkpointing.agent.events import SlowRanks
from checkpointing.files.sharding import has_sharded
from checkpointing.process import device
from checkpointing.process.device import DeviceMark
from checkpointing.process.ranks import Ranks

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


class ForwardTimer:
    """Times the forward passes of a model in training; on an accelerator by its own clock, without waiting for it.

    Passes without gradients do not count. A compiled model, or one that a CUDA graph records, is not timed: the graph
    must not contain the timer.

    Args:
        model: The model, without a DDP wrapper, whose forward passes wait for other ranks.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._device = device.of(model.parameters())
        self._began: tuple[DeviceMark, float] | None = None
        # By step: its passes' marks, or their seconds where the host computes them.
        self._steps: list[list[tuple[DeviceMark, DeviceMark] | float]] = []
        self._passes: list[tuple[DeviceMark, DeviceMark] | float] = []
        self._hooks = [
            model.register_forward_pre_hook(self._before),
            model.register_forward_hook(self._after),
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        # Hooks are copied, and pickled, with their model. A copy of it is not timed.
        return ForwardTimer, (torch.nn.Module(),)

    def end_step(self) -> None:
        """Note that a step has ended."""
        self._steps.append(self._passes)
        self._passes = []

    def take(self) -> float:
        """Return the median of the seconds per step since the last call; 0 if that is unknown."""
        steps, self._steps = self._steps, []
        if self._device.is_asynchronous:
            # The device may not have computed the last one yet.
            steps = steps[:-1]
        seconds = [total for passes in steps if (total := _total(passes)) > 0]
        return statistics.median(seconds) if seconds else 0.0

    def close(self) -> None:
        """Stop timing."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()) or device.is_capturing():
            return
        self._began = self._device.mark(), time.perf_counter()

    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._began is None:
            return
        (mark, began), self._began = self._began, None
        if self._device.is_asynchronous:
            self._passes.append((mark, self._device.mark()))
        else:
            self._passes.append(time.perf_counter() - began)


def _total(passes: Sequence[tuple[DeviceMark, DeviceMark] | float]) -> float:
    """Return the seconds of one step's passes; 0 if one of them is unknown."""
    seconds = [one if isinstance(one, float) else one[1].seconds_since(one[0]) for one in passes]
    return sum(value for value in seconds if value is not None) if None not in seconds else 0.0


class SpeedComparison:
    """Compares all ranks every `WINDOW_STEPS` steps; every rank calls all methods in lock-step.

    Args:
        ranks: This rank, with a group that the calling thread uses.
        timer: Knows how long this rank computes by itself.
        node_rank: Node rank of this rank's node.
        report: Called on rank 0 when the slow ranks are others than before.
    """

    def __init__(
        self, ranks: Ranks, timer: ForwardTimer, *, node_rank: int, report: Callable[[SlowRanks], None]
    ) -> None:
        self._ranks, self._timer, self._node_rank, self._report = ranks, timer, node_rank, report
        self._num_steps = 0
        self._pending: Callable[[], list[list[float]]] | None = None
        self._reported: set[int] = set()

    def end_of_step(self) -> None:
        """Note that a step has ended; the comparison that it begins is reported at the end of the next one."""
        self.drain()
        self._timer.end_step()
        self._num_steps += 1
        if self._num_steps % WINDOW_STEPS == 0:
            self._pending = self._ranks.gather_later([self._timer.take(), self._node_rank])

    def drain(self) -> None:
        """Wait for the comparison in flight, and report it."""
        if self._pending is None:
            return
        everyone, self._pending = self._pending(), None
        slow = slow_ranks([seconds for seconds, _ in everyone])
        if self._ranks.is_first and slow.keys() != self._reported:
            nodes = [int(everyone[rank][1]) for rank in slow]
            self._report(SlowRanks(ranks=list(slow), ratios=list(slow.values()), nodes=nodes))
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
    return SpeedComparison(ranks, ForwardTimer(model), node_rank=node_rank, report=report)
