"""Writes a rank's heartbeat, by which a watchdog tells a slow step from a hang."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from checkpointing.host.heartbeat import ControlPage, Heartbeat, Phase, machine_clock


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

        The time does not count for the step that has begun.
        """
        before, began, now = self.phase, self._step_began, time.monotonic()
        self.interrupt(phase, step)
        try:
            yield
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
