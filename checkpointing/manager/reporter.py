"""What a rank tells its node: signs of life, and rank 0's reports to a supervisor, by way of the agent."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from checkpointing.agent.client import AgentClient
from checkpointing.agent.events import (
    BatchShape,
    BegunWithWeights,
    Evaluated,
    Event,
    Log,
    Restored,
    SlowRanks,
    StepsRepeated,
    TrainingStarted,
)
from checkpointing.host import process_title
from checkpointing.host.heartbeat import ControlPage, Heartbeat, Phase, machine_clock
from checkpointing.process.device import peak_memory_bytes
from checkpointing.resume.initial_weights import InitialWeights

# Metrics that a loop measures at every step are reported this often.
_REPORT_EVERY_S = 1.0


class Reporter:
    """Sends events on rank 0; on other ranks, its methods do nothing.

    Args:
        client: The connection to the agent.
        is_first: Whether this is rank 0.
    """

    def __init__(self, client: AgentClient, *, is_first: bool) -> None:
        self._client, self._is_first = client, is_first
        self._reported_at = 0.0

    def training_started(self, step: int, total_steps: int | None, restore_s: float) -> None:
        """Report where training starts, and the seconds that restoring took; 0 where nothing was restored."""
        self._send(TrainingStarted(step=step, total_steps=total_steps))
        if restore_s:
            self._send(Restored(step=step, seconds=round(restore_s, 3)))

    def batch_shape(self, event: BatchShape) -> None:
        """Report how a step is cut."""
        self._send(event)

    def steps_repeated(self, event: StepsRepeated) -> None:
        """Report how what was recomputed compares."""
        self._send(event)

    def begun_with_weights(self, found: InitialWeights) -> None:
        """Report with which weights training begins."""
        if self._is_first:
            print(f"checkpointing: begun with {found.describe()}", file=sys.stderr, flush=True)
        num = {"loaded": found.loaded, "missing": len(found.missing), "unused": len(found.unused)}
        self._send(BegunWithWeights(folder=found.folder, **num))

    def slow_ranks(self, event: SlowRanks) -> None:
        """Report which ranks compute more slowly than the others."""
        self._send(event)

    def metrics(
        self, step: int, values: Mapping[str, Any], best_by: str | None = None, higher_is_better: bool | None = None
    ) -> None:
        """Report what was measured at a step; leaves out what is not a finite number. See `Evaluated` for the rest."""
        if not self._is_first:
            return
        numbers = {name: float(value) for name, value in values.items() if is_finite(value)}
        if "loss" in numbers:
            loss = numbers.pop("loss")
            memory_gb = round(peak_memory_bytes() / 1e9, 3)
            self._send(Log(step=step, loss=loss, metrics={"peak_memory_gb": memory_gb, **numbers}))
        elif any(name.startswith("eval_") for name in numbers):
            event = Evaluated(step=step, metrics=numbers, best_by=best_by, higher_is_better=higher_is_better)
            self._send(event)

    def metrics_of_every_step(self, step: int, values: Mapping[str, Any] | None) -> None:
        """Report metrics once a second."""
        now = time.monotonic()
        if values and now - self._reported_at >= _REPORT_EVERY_S:
            self._reported_at = now
            self.metrics(step, values)

    def _send(self, event: Event) -> None:
        if self._is_first:
            self._client.announce(event)


def is_finite(value: object) -> bool:
    """Return whether a value is a finite number and not a bool; a tensor with one element counts."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and math.isfinite(value.item())
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class HeartbeatWriter:
    """The heartbeat of one rank, in its slot of the shared page.

    Args:
        page: The page that agent, supervisor and ranks share.
        slot: Number of this rank on its node.

    Attributes:
        phase: What the rank is doing.
        step: The last step that ended.
        start_step: The step that this attempt started from.
    """

    def __init__(self, page: ControlPage, slot: int) -> None:
        self._page, self._slot = page, slot
        self.phase, self.step = Phase.STARTING, 0
        self.start_step, self._start_time = 0, 0.0
        self._num_beats = 0
        # When the running step began; None where its duration says nothing about the next one's.
        self._step_began: float | None = None

    def write(self, phase: Phase, step: int, step_s: float = 0.0) -> None:
        """Write a heartbeat.

        Args:
            phase: What the rank does from now on.
            step: The last step that ended.
            step_s: Duration of that step, in seconds; 0 where it is not typical.
        """
        self.phase, self.step = phase, step
        self._num_beats += 1
        beat = Heartbeat(phase, step, machine_clock(), self.start_step, self._start_time, step_s, self._num_beats)
        self._page.write(self._slot, beat)
        process_title.show_step(step)

    def set_start(self, step: int) -> None:
        """Set the step from which training starts now; the next heartbeat carries it."""
        self.start_step, self._start_time = step, machine_clock()

    def end_step(self, step: int) -> None:
        """Note that a step has ended, and how long it took."""
        now = time.monotonic()
        began, self._step_began = self._step_began, now
        self.write(Phase.TRAINING, step, now - began if began is not None else 0.0)

    def interrupt(self, phase: Phase, step: int | None = None) -> None:
        """Note that something other than training runs, so that the duration of this step is not typical."""
        self._step_began = None
        self.write(phase, self.step if step is None else step)

    @contextlib.contextmanager
    def during(self, phase: Phase, step: int | None = None) -> Iterator[None]:
        """Note that something other than training runs, and then again what ran before.

        The time does not count for the step that has begun. A rank that ends by an exception while no step runs says so
        to the last; one whose script goes on is training again with its next step.
        """
        before, began, now = self.phase, self._step_began, time.monotonic()
        self.interrupt(phase, step)
        try:
            yield
        except BaseException:
            before = Phase.IDLE if phase is Phase.IDLE else before
            raise
        finally:
            self.write(before, self.step)
            self._step_began = began + time.monotonic() - now if began is not None else None

    def watch_compiler(self) -> None:
        """Note when torch.compile runs: the first step, or a later one, may then take minutes."""
        if "torch._dynamo" not in sys.modules:
            return
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(self._compiling)
        callback_handler.register_end_callback(self._compiled)

    def _compiling(self, _: object) -> None:
        if self.phase is Phase.TRAINING:
            self.interrupt(Phase.COMPILING)

    def _compiled(self, _: object) -> None:
        if self.phase is Phase.COMPILING:
            self.write(Phase.TRAINING, self.step)
