"""Dividing the order of a run as its world size or micro-batch size changes: each step keeps its samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import BatchSampler

from checkpointing.data.position import Position
from checkpointing.data.step_layout import StepLayout
from checkpointing.errors import CheckpointError


def recut_position(position: Position, now: StepLayout, steps_per_epoch: int) -> Position:
    """Express a position in the micro-batches of another layout.

    Args:
        position: As recorded, with its layout.
        now: The present layout.
        steps_per_epoch: Optimizer steps in one epoch.

    Raises:
        ValueError: The position does not say how steps were divided.
    """
    if position.layout is None:
        raise ValueError("the position does not say how steps were divided")
    if position.layout == now:
        return position
    # An epoch's last step may be shorter.
    steps = math.ceil(position.consumed / position.layout.accumulation)
    return replace(position, consumed=min(steps, steps_per_epoch) * now.accumulation, order=None)


class RecutBatchSampler(BatchSampler):
    """The order of a run that began with another layout, divided as it is now.

    Each step gets exactly the samples that it would have had, including those with which accelerate fills up the end
    of an epoch.
    """

    def __init__(self, batches: Any, made_for: StepLayout, now: StepLayout, rank: int) -> None:
        """Take over the sampler inside a batch sampler.

        Args:
            batches: The batch sampler as accelerate has prepared it for this rank.
            made_for: Layout when the run began.
            now: The present layout.
            rank: This process's rank.

        Raises:
            CheckpointError: The order of `batches` may depend on how it is divided.
        """
        from accelerate.data_loader import BatchSamplerShard

        sharded = isinstance(batches, BatchSamplerShard)
        plain = batches.batch_sampler if sharded else batches
        if type(plain) is not BatchSampler or (sharded and (batches.split_batches or not batches.even_batches)):
            raise CheckpointError(
                f"the order of {type(plain).__name__} depends on the number of ranks and the size of micro-batches, "
                f"which were {made_for.world_size} x {made_for.batch_size} (accumulation {made_for.accumulation}) and "
                f"now are {now.world_size} x {now.batch_size} ({now.accumulation}): resume with the former"
            )
        self.sampler, self.drop_last, self.batch_size = plain.sampler, plain.drop_last, now.batch_size
        self._made_for, self._now, self._rank = made_for, now, rank
        # Batches of the newest iteration, by number, that only fill up a rank's share of a step.
        self._fillers: set[int] = set()

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

    def is_filler(self, number: int) -> bool:
        """Return whether a batch of the newest iteration has a sample of another rank, and must not count."""
        return number in self._fillers

    def __iter__(self) -> Iterator[list[Any]]:
        return self._uneven() if self._now.uneven_samples else self._even()

    def _uneven(self) -> Iterator[list[Any]]:
        """Deal each step's samples as evenly as possible; every rank makes as many batches."""
        now, number = self._now, 0
        self._fillers.clear()
        for step in self._steps():
            share = [step[index] for index in now.share_of(self._rank, len(step))]
            count = math.ceil(len(now.share_of(0, len(step))) / now.batch_size)
            for part in range(count):
                samples = share[part * len(share) // count : (part + 1) * len(share) // count]
                if not samples:
                    self._fillers.add(number)
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
