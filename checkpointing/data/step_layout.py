"""How the samples of an optimizer step are divided among ranks and micro-batches."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True)
class StepLayout:
    """The division of one optimizer step.

    Attributes:
        world_size: Number of ranks that share each step.
        batch_size: Samples per micro-batch and rank; the most of them, if they are uneven.
        accumulation: Micro-batches per step and rank.
        uneven_samples: Samples of a step that the ranks cannot share equally; 0 if they do.
    """

    world_size: int
    batch_size: int
    accumulation: int
    uneven_samples: int = 0

    @property
    def samples_per_step(self) -> int:
        """Number of samples that all ranks together use in one step."""
        return self.uneven_samples or self.world_size * self.batch_size * self.accumulation

    def share_of(self, rank: int, samples: int) -> range:
        """Return which of a step's samples an uneven layout deals to a rank, as evenly as possible.

        Args:
            rank: The rank.
            samples: Samples of the step; the last one of an epoch may have fewer.
        """
        size, rest = divmod(samples, self.world_size)
        begin = rank * size + min(rank, rest)
        return range(begin, begin + size + (rank < rest))

    def to_list(self) -> list[int]:
        """Return world size, batch size and accumulation, and the number of samples if it is uneven."""
        return list(astuple(self))[: 4 if self.uneven_samples else 3]

    @classmethod
    def from_list(cls, counts: Any) -> StepLayout:
        """Parse what `to_list` returns.

        Raises:
            ValueError: The value is not a list of three or four positive integers.
        """
        if not isinstance(counts, list) or len(counts) not in (3, 4):
            raise ValueError(f"{counts!r} is not a step layout")
        if not all(type(count) is int and count > 0 for count in counts):
            raise ValueError(f"the step layout {counts!r} holds something that is not a positive integer")
        return cls(*counts)
