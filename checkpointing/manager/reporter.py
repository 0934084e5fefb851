"""Rank 0's reports to a supervisor, by way of the agent."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from checkpointing.agent.client import AgentClient
from checkpointing.agent.events import BatchShape, Evaluated, Event, Log, Restored, SlowRanks, TrainingStarted

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

    def slow_ranks(self, event: SlowRanks) -> None:
        """Report which ranks compute more slowly than the others."""
        self._send(event)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Report what was measured at a step; leaves out what is not a finite number."""
        if not self._is_first:
            return
        numbers = {name: float(value) for name, value in values.items() if is_finite(value)}
        if "loss" in numbers:
            loss = numbers.pop("loss")
            self._send(Log(step=step, loss=loss, metrics=numbers))
        elif "eval_loss" in numbers:
            self._send(Evaluated(step=step, metrics=numbers))

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
