"""Records what each step computes, without waiting for a device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from checkpointing.format.step_record import StepRecord, StepRing, float_bits
from checkpointing.process import device
from checkpointing.process.device import Later
from checkpointing.proof.digests import (
    BatchDigest,
    Digest,
    ParameterSamples,
    generator_digests,
    learning_rate_bits,
)

# Steps whose figures a device may be late with; older ones are waited for.
_MOST_OPEN = 16


class _LateStep(NamedTuple):
    """A step that has ended.

    Attributes:
        step: Its number.
        tokens: As in a record.
        known: What is known, as in a record.
        late: What a device has yet to compute, by name.
    """

    step: int
    tokens: int
    known: dict[str, int]
    late: dict[str, Later | Digest]

    @property
    def has_arrived(self) -> bool:
        return all(one.has_arrived for one in self.late.values())

    def record(self) -> StepRecord:
        self.known.update((name, _bits(one)) for name, one in self.late.items())
        return StepRecord(self.step, self.known, self.tokens)


def _bits(one: Later | Digest) -> int:
    return one.value() if isinstance(one, Digest) else float_bits(float(one))


class StepRecorder:
    """Collects what the step that runs computes; its methods are called by the thread that trains.

    Args:
        ring: Where records are kept.
        differs: Called with each record, in order, once all of it is known; returns what differs from the one that the
            step had before.
    """

    def __init__(self, ring: StepRing, differs: Callable[[StepRecord], tuple[str, ...]]) -> None:
        self._ring, self._differs = ring, differs
        self._batch, self._ended = BatchDigest(), deque[_LateStep]()
        self._parameters = ParameterSamples()
        self._loss: torch.Tensor | float | None = None
        # Also taken by the thread that copies snapshots.
        self._lock = threading.Lock()

    def batch(self, batch: object) -> None:
        """Add a micro-batch as it enters the model."""
        if not device.is_capturing():
            self._batch.add_batch(batch)

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
        batch, self._batch = self._batch, BatchDigest()
        loss, self._loss = self._loss, None
        if device.is_capturing():
            return
        known: dict[str, int] = generator_digests()
        groups = getattr(optimizer, "param_groups", None) or ()
        if (rate := learning_rate_bits(groups)) is not None:
            known["learning_rate"] = rate
        figures = figures if loss is None else {"loss": loss, **figures}
        found: dict[str, Later | Digest] = {name: Later(value) for name, value in figures.items() if value is not None}
        if batch.count:
            found["batch"] = batch
        parameters = self._parameters.read([one for group in groups for one in group["params"]])
        if parameters.count:
            found["parameters"] = parameters
        late = {}
        for name, one in found.items():
            if one.has_arrived:
                known[name] = _bits(one)
            else:
                late[name] = one
        with self._lock:
            self._ended.append(_LateStep(step, batch.tokens, known, late))
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
        """Put back what a checkpoint holds, where memory holds nothing: another stage may have its records there."""
        for record in records:
            if self._ring.is_free(record.step):
                self._ring.put(record)
