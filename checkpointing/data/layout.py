"""How the samples of an optimizer step are divided among ranks and micro-batches."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True)
class StepLayout:
    """The division of one optimizer step.

    Attributes:
        world_size: Number of ranks that share each step.
        batch_size: Samples per micro-batch and rank.
        accumulation: Micro-batches per step and rank.
    """

    world_size: int
    batch_size: int
    accumulation: int

    @property
    def samples_per_step(self) -> int:
        """Number of samples that all ranks together use in one step."""
        return self.world_size * self.batch_size * self.accumulation

    def to_list(self) -> list[int]:
        """Return world size, batch size and accumulation."""
        return list(astuple(self))

    @classmethod
    def from_list(cls, counts: Any) -> StepLayout:
        """Parse what `to_list` returns.

        Raises:
            ValueError: The value is not a list of three positive integers.
        """
        if not isinstance(counts, list) or len(counts) != 3:
            raise ValueError(f"{counts!r} is not a step layout")
        if not all(type(count) is int and count > 0 for count in counts):
            raise ValueError(f"the step layout {counts!r} holds something that is not a positive integer")
        return cls(*counts)
