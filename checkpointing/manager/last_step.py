"""The step that a loop ended last, which is committed when the manager is closed."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from checkpointing.process.ranks import Ranks

logger = logging.getLogger("checkpointing")


class LastStep:
    """What `CheckpointManager.step` was last called with.

    Attributes:
        step: Number of the step; 0 before the first.
        samples_consumed: Samples drawn by all ranks.
        metrics: Metrics of the step, by name.
    """

    def __init__(self) -> None:
        self.step = self.samples_consumed = 0
        self.metrics: Mapping[str, float] | None = None

    def ended(self, step: int, samples_consumed: int, metrics: Mapping[str, float] | None) -> None:
        """Note that a step has ended."""
        self.step, self.samples_consumed, self.metrics = step, samples_consumed, metrics

    def is_to_be_committed(self, ranks: Ranks, *, missing: bool, unfit: bool, written: bool) -> bool:
        """Decide, together with all ranks, whether the step is committed now.

        Args:
            ranks: This rank among all.
            missing: This rank's step is in no snapshot that is committed. Other machines may have had memory for it.
            unfit: This rank's state belongs to no step: a further one has begun, or an exception is being raised.
            written: This rank has committed the step itself, without a snapshot.
        """
        found = ranks.maximum(torch.tensor([int(missing), int(unfit), int(written)]))
        missing, unfit, written = map(bool, found.tolist())
        missing = missing and not written
        if missing and unfit:
            logger.warning("step %d is not committed: close() was called in the middle of a later step", self.step)
        return missing and not unfit
