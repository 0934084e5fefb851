"""Records what each step computes, without waiting for a device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from checkpointing.format.step_record import StepRecord, StepRing, float_bits
from checkpointing.process import device
from checkpointing.process.device import Later, LateTensor
from checkpointing.proof.digests import (
    BatchDigest,
    ParameterSamples,
    digest64,
    generator_digests,
    learning_rate_bits,
    samples_digest,
)

# Steps whose figures a device may be late with; older ones are waited for.
_MOST_OPEN = 16


@dataclass
class _OpenStep:
    """A step that runs, or of which a device has yet to compute something."""

    step: int = 0
    values: dict[str, int] = field(default_factory=dict)
    batches: list[BatchDigest] = field(default_factory=list)
    figures: dict[str, Later] = field(default_factory=dict)
    samples: list[LateTensor] = field(default_factory=list)

    @property
    def has_arrived(self) -> bool:
        late: list[Any] = [*self.batches, *self.figures.values(), *self.samples]
        return all(one.has_arrived for one in late)

    def record(self) -> StepRecord:
        values = dict(self.values)
        if self.batches and all(batch.is_known for batch in self.batches):
            values["batch"] = digest64(batch.value() for batch in self.batches)
        values |= {name: float_bits(float(figure)) for name, figure in self.figures.items()}
        if self.samples:
            values["parameters"] = samples_digest(self.samples)
        return StepRecord(self.step, values, sum(batch.tokens for batch in self.batches))


class StepRecorder:
    """Collects what the step that runs computes; its methods are called by the thread that trains.

    Args:
        ring: Where records are kept.
        differs: Called with each record, in order, once all of it is known; returns what differs from the one that the
            step had before.
    """

    def __init__(self, ring: StepRing, differs: Callable[[StepRecord], tuple[str, ...]]) -> None:
        self._ring, self._differs = ring, differs
        self._running, self._ended = _OpenStep(), deque[_OpenStep]()
        self._parameters = ParameterSamples()
        self._loss: torch.Tensor | float | None = None
        # Also taken by the thread that copies snapshots.
        self._lock = threading.Lock()

    def batch(self, batch: object) -> None:
        """Add a micro-batch as it enters the model."""
        if not device.is_capturing():
            self._running.batches.append(BatchDigest(batch))

    def loss(self, value: torch.Tensor | float) -> None:
        """Add the loss of a micro-batch."""
        if not device.is_capturing():
            value = value.detach() if isinstance(value, torch.Tensor) else value
            self._loss = value if self._loss is None else self._loss + value

    def end(
        self,
        step: int,
        optimizer: Any,
        *,
        figures: dict[str, Any],
    ) -> None:
        """Record the step that has ended.

        Args:
            step: Its number.
            optimizer: Has `param_groups`, or its parameters and learning rates are not recorded.
            figures: Numbers, or tensors of one, by their name in a record; None where there is none.
        """
        running, self._running = self._running, _OpenStep()
        loss, self._loss = self._loss, None
        if device.is_capturing():
            return
        running.step = step
        known = {"loss": loss, **{name: value for name, value in figures.items() if value is not None}}
        running.figures = {name: Later(value) for name, value in known.items() if value is not None}
        running.values = dict(generator_digests())
        groups = getattr(optimizer, "param_groups", None) or ()
        if (rate := learning_rate_bits(groups)) is not None:
            running.values["learning_rate"] = rate
        running.samples = self._parameters.read(one for group in groups for one in group["params"])
        with self._lock:
            self._ended.append(running)
        self.settle()

    def settle(self, *, wait: bool = False) -> None:
        """Write the records of which everything has arrived; with `wait`, all."""
        with self._lock:
            while self._ended and (wait or len(self._ended) > _MOST_OPEN or self._ended[0].has_arrived):
                record = self._ended.popleft().record()
                differs = self._differs(record)
                self._ring.put(replace(record, differed=differs) if differs else record)

    def file(self, step: int) -> bytes:
        """Return the record up to a step as a file; waits for the device."""
        self.settle(wait=True)
        return self._ring.to_bytes(step)

    def restore(self, records: Iterable[StepRecord]) -> None:
        """Put back what a checkpoint holds."""
        for record in records:
            if self._ring.get(record.step) is None:
                self._ring.put(record)
