"""Which rank draws which batch: the samples of a step do not depend on how many ranks share it.

A run with another world size or micro-batch size keeps the samples of each step, see `RecutBatchSampler`. Virtual ranks
also keep each micro-batch: they are numbered over all virtual ranks, and number n is drawn in round n // V, by virtual
rank n % V. A step takes as many rounds as each virtual rank has micro-batches. So a position, and what is drawn at
random while a batch is made, do not depend on the number of ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

from torch.utils.data import BatchSampler

from checkpointing.errors import CheckpointError

# Their order depends on nothing but a seed: not, say, on how many samples a rank draws at a time.
_SAMPLERS = ("RandomSampler", "SequentialSampler", "SeedableRandomSampler")


def block_of(rank: int, world_size: int, count: int) -> range:
    """Return which of `count` virtual ranks or samples a rank has: as evenly as possible, larger blocks first."""
    size, rest = divmod(count, world_size)
    begin = rank * size + min(rank, rest)
    return range(begin, begin + size + (rank < rest))


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


def check_virtual_ranks(count: object) -> None:
    """Check what a script gives as the number of virtual ranks.

    Raises:
        ValueError: It is neither a positive number nor "auto" nor None.
    """
    if not (count is None or count == "auto" or (type(count) is int and count > 0)):
        raise ValueError(f"virtual_ranks is {count!r}; use a positive number, or 'auto'")


@dataclass(frozen=True)
class Dealing:
    """Which micro-batches are whose, of so many virtual ranks.

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
        """Return a step's micro-batches, drawn round by round, in the order in which this rank computes them.

        Each with its virtual rank and round: all of one virtual rank after the other's.
        """
        size = len(self.block)
        return [
            (virtual_rank, number // size, drawn[number])
            for place, virtual_rank in enumerate(self.block)
            for number in range(place, len(drawn), size)
        ]


def _inside(batches: Any) -> tuple[Any, bool]:
    """Return the batch sampler that accelerate has prepared, and whether any division leaves its order as it is."""
    is_shard = type(batches).__name__ == "BatchSamplerShard"
    plain = batches.batch_sampler if is_shard else batches
    is_divided = is_shard and (batches.split_batches or not batches.even_batches)
    return plain, type(plain) is BatchSampler and not is_divided


class DealtBatchSampler(BatchSampler):
    """All micro-batches of all virtual ranks, in order; an epoch is filled up so that all have equally many.

    Raises:
        CheckpointError: The order of `batches`, the loader's batch sampler, may depend on the number of ranks.
    """

    def __init__(self, batches: Any, dealing: Dealing) -> None:
        plain, is_fixed = _inside(batches)
        if not is_fixed or type(plain.sampler).__name__ not in _SAMPLERS:
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


class RecutBatchSampler(BatchSampler):
    """The order of a run that began with another layout, divided as it is now.

    Each step gets exactly the samples that it would have had, including those with which accelerate fills up the end
    of an epoch.

    Attributes:
        fillers: Batches of the newest iteration, by number, that have only a sample of another rank: they fill up a
            rank's share of a step, and must not count.
    """

    def __init__(self, batches: Any, made_for: StepLayout, now: StepLayout, rank: int) -> None:
        """Take over the sampler inside a batch sampler, which accelerate may have prepared for this rank.

        Raises:
            CheckpointError: The order of `batches` may depend on how it is divided.
        """
        plain, is_fixed = _inside(batches)
        if not is_fixed:
            raise CheckpointError(
                f"the order of {type(plain).__name__} depends on the number of ranks and the size of micro-batches, "
                f"which were {made_for.world_size} x {made_for.batch_size} (accumulation {made_for.accumulation}) and "
                f"now are {now.world_size} x {now.batch_size} ({now.accumulation}): resume with the former"
            )
        self.sampler, self.drop_last, self.batch_size = plain.sampler, plain.drop_last, now.batch_size
        self._made_for, self._now, self._rank = made_for, now, rank
        self.fillers: set[int] = set()

    def _rounds(self) -> Iterator[list[Any]]:
        """Iterate over what all ranks together drew for their first micro-batches, their second ones, and so on."""
        from accelerate.data_loader import BatchSamplerShard

        was = self._made_for
        plain = BatchSampler(self.sampler, was.batch_size, self.drop_last)
        if was.world_size == 1:
            yield from plain
            return
        # Each shard reads all batches, but the sampler itself may be iterated only once.
        readers = [_TeedBatches(plain, iterator) for iterator in itertools.tee(iter(plain), was.world_size)]
        shards: list[Any] = [BatchSamplerShard(reader, was.world_size, rank) for rank, reader in enumerate(readers)]
        for batches in zip(*shards, strict=True):
            yield list(itertools.chain(*batches))

    def _steps(self) -> Iterator[list[Any]]:
        """Iterate over what all ranks together drew for each optimizer step."""
        rounds = self._rounds()
        while step := list(itertools.chain(*itertools.islice(rounds, self._made_for.accumulation))):
            yield step

    def __iter__(self) -> Iterator[list[Any]]:
        return self._uneven() if self._now.uneven_samples else self._even()

    def _uneven(self) -> Iterator[list[Any]]:
        """Deal each step's samples as evenly as possible; every rank makes as many batches."""
        now, number = self._now, 0
        self.fillers.clear()
        for step in self._steps():
            share = [step[index] for index in block_of(self._rank, now.world_size, len(step))]
            count = math.ceil(len(block_of(0, now.world_size, len(step))) / now.batch_size)
            for part in range(count):
                samples = share[part * len(share) // count : (part + 1) * len(share) // count]
                if not samples:
                    self.fillers.add(number)
                yield samples or step[:1]
                number += 1

    def _even(self) -> Iterator[list[Any]]:
        now = self._now
        first: list[Any] = []
        for step in self._steps():
            first = first or step
            # An epoch's last step may hold fewer samples, which need not divide evenly.
            missing = -len(step) % now.world_size
            step += (first * missing)[:missing]
            per_round = now.world_size * now.batch_size
            for begin in range(0, len(step), per_round):
                samples = step[begin : begin + per_round]
                share = len(samples) // now.world_size
                yield samples[self._rank * share : (self._rank + 1) * share]

    def __len__(self) -> int:
        was, now = self._made_for, self._now
        num_samples = len(self.sampler)  # type: ignore[arg-type]
        batches = num_samples // was.batch_size if self.drop_last else math.ceil(num_samples / was.batch_size)
        rounds = batches // was.world_size if self.drop_last else math.ceil(batches / was.world_size)
        whole, rest = divmod(rounds, was.accumulation)
        left = rest * was.world_size * was.batch_size
        if was.world_size == 1 and not self.drop_last:
            # A single process is not filled up.
            whole, left = divmod(num_samples, was.samples_per_step)
        share = math.ceil(left / now.world_size)
        return whole * now.accumulation + math.ceil(share / now.batch_size)


class _TeedBatches:
    """One of several readers of a batch sampler that is iterated once."""

    def __init__(self, batches: BatchSampler, iterator: Iterator[list[Any]]) -> None:
        self._iterator, self._length = iterator, len(batches)
        self.batch_size, self.drop_last = batches.batch_size, batches.drop_last

    def __iter__(self) -> Iterator[list[Any]]:
        # A shard fills batches up in place.
        return map(list, self._iterator)

    def __len__(self) -> int:
        return self._length
