"""The micro-batches of virtual ranks, in the order in which as many processes would draw them.

They are numbered over all virtual ranks: number n is drawn in round n // V, by virtual rank n % V. A step takes as many
rounds as each virtual rank has micro-batches. So a position, and what is drawn at random while a batch is made, do not
depend on the number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler

from checkpointing.errors import CheckpointError

# Their order depends on nothing but a seed: not, say, on how many samples a rank draws at a time.
_SAMPLERS = ("RandomSampler", "SequentialSampler", "SeedableRandomSampler")


def check_virtual_ranks(count: object) -> None:
    """Check what a script gives as the number of virtual ranks.

    Raises:
        ValueError: It is neither a positive number nor "auto" nor None.
    """
    if not (count is None or count == "auto" or (type(count) is int and count > 0)):
        raise ValueError(f"virtual_ranks is {count!r}; use a positive number, or 'auto'")


def block_of(rank: int, world_size: int, virtual_ranks: int) -> range:
    """Return the virtual ranks that a rank computes: as evenly as possible, larger blocks first.

    Args:
        rank: The rank.
        world_size: Number of ranks, at most that of virtual ranks.
        virtual_ranks: Number of virtual ranks.
    """
    size, rest = divmod(virtual_ranks, world_size)
    begin = rank * size + min(rank, rest)
    return range(begin, begin + size + (rank < rest))


@dataclass(frozen=True)
class Dealing:
    """Which micro-batches are whose.

    Attributes:
        virtual_ranks: Number of virtual ranks.
        rank: Number of this rank.
        world_size: Number of ranks.

    Raises:
        CheckpointError: There are more ranks than virtual ranks.
    """

    virtual_ranks: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size > self.virtual_ranks:
            raise CheckpointError(
                f"{self.world_size} ranks cannot share {self.virtual_ranks} virtual ranks: start at most "
                f"{self.virtual_ranks}"
            )

    @property
    def block(self) -> range:
        """The virtual ranks of this rank."""
        return block_of(self.rank, self.world_size, self.virtual_ranks)

    @property
    def largest(self) -> int:
        """The most virtual ranks that a rank has."""
        return len(block_of(0, self.world_size, self.virtual_ranks))

    def count_of_all(self, num_batches: int) -> int:
        """Return how many micro-batches all ranks compute, while a rank with the most of them computes so many."""
        return num_batches // self.largest * self.virtual_ranks

    def count_here(self, num_batches: int) -> int:
        """Return how many a rank with the most of them computes, of so many of all ranks."""
        return num_batches // self.virtual_ranks * self.largest

    def is_ours(self, number: int) -> bool:
        """Return whether this rank computes a micro-batch."""
        return number % self.virtual_ranks in self.block

    def arranged(self, drawn: list[Any]) -> list[tuple[int, int, Any]]:
        """Return a step's micro-batches in the order in which this rank computes them.

        Args:
            drawn: As this rank has drawn them, round by round.

        Returns:
            Virtual rank, round and micro-batch: all of one virtual rank after the other's.
        """
        size = len(self.block)
        return [
            (virtual_rank, number // size, drawn[number])
            for place, virtual_rank in enumerate(self.block)
            for number in range(place, len(drawn), size)
        ]


class DealtBatchSampler(BatchSampler):
    """All micro-batches of all virtual ranks, in order; an epoch is filled up so that all have equally many.

    Args:
        batches: The loader's batch sampler; if accelerate has prepared it, what is inside.
        dealing: Which are whose.

    Raises:
        CheckpointError: The order of `batches` may depend on the number of ranks.
    """

    def __init__(self, batches: Any, dealing: Dealing) -> None:
        plain = batches.batch_sampler if type(batches).__name__ == "BatchSamplerShard" else batches
        split = getattr(batches, "split_batches", False) or not getattr(batches, "even_batches", True)
        if type(plain) is not BatchSampler or split or type(plain.sampler).__name__ not in _SAMPLERS:
            raise CheckpointError(
                f"virtual ranks need a loader that deals the same batches to any number of ranks, which "
                f"{type(plain).__name__} with {type(getattr(plain, 'sampler', None)).__name__} does not: use a plain "
                "DataLoader with batch_size and shuffle, the same on all ranks"
            )
        self.sampler, self.drop_last, self.batch_size = plain.sampler, plain.drop_last, plain.batch_size
        self._plain, self._dealing = plain, dealing

    def __iter__(self) -> Iterator[list[Any]]:
        count, first, number = self._dealing.virtual_ranks, list[Any](), 0
        for batch in self._plain:
            if len(first) < count * self.batch_size:
                first += batch
            if len(batch) < self.batch_size:
                # From the beginning of the epoch, as accelerate does it.
                batch = batch + list(itertools.islice(itertools.cycle(first), self.batch_size - len(batch)))
            yield batch
            number += 1
        for place in range(-number % count):
            begin = place * self.batch_size
            yield list(itertools.islice(itertools.cycle(first), begin, begin + self.batch_size))

    def __len__(self) -> int:
        """Return the number of micro-batches that a rank with the most of them computes."""
        return -(-len(self._plain) // self._dealing.virtual_ranks) * self._dealing.largest
