"""The data cursor: which samples a global step sees, as a function of the step alone.

An epoch is a seeded permutation of the data set, filled up from its own start to whole global batches (what HF's
`even_batches` does for micro-batches). The position in it is an index: resuming costs the same at any step, and the
samples of a global step are the same for every world size that divides the global batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Sampler


class CursorBatchSampler(Sampler[list[int]]):
    """Micro-batches of one rank.

    Args:
        num_samples: size of the data set.
        batch_size: samples per micro-batch.
        rank, world_size: this process among those that share each global batch.
        accumulation: micro-batches per optimizer step and rank.
        seed: of the permutations; epoch `e` uses `seed + e`.
        shuffle: False keeps the data set's own order.
        drop_last: leave out the samples that fill no global batch, instead of filling it up.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        rank: int,
        world_size: int,
        accumulation: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        needed = batch_size * accumulation * world_size if drop_last else 1
        if num_samples < needed:
            raise ValueError(f"the training data set has {num_samples} samples; at least {needed} are needed")
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._accumulation = accumulation
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._epoch = 0
        self._first_batch = 0

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step, over all ranks."""
        return self._batch_size * self._accumulation * self._world_size

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self._num_samples, self.global_batch_size)
        return whole if self._drop_last or rest == 0 else whole + 1

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def start_at(self, micro_batch: int) -> None:
        """Let the next iteration begin at this micro-batch of the epoch (once)."""
        self._first_batch = micro_batch

    def epoch_order(self) -> torch.Tensor:
        """The epoch's sample indices in the order of global steps: int64, whole global batches."""
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._num_samples, generator=generator)
        else:
            order = torch.arange(self._num_samples)
        total = self.steps_per_epoch * self.global_batch_size
        return order.repeat(-(-total // self._num_samples))[:total]

    def __len__(self) -> int:
        return self.steps_per_epoch * self._accumulation

    def __iter__(self) -> Iterator[list[int]]:
        first, self._first_batch = self._first_batch, 0
        order = self.epoch_order().view(-1, self._world_size, self._batch_size)
        for micro_batch in range(first, len(self)):
            yield order[micro_batch, self._rank].tolist()


class CursorDataLoader(DataLoader):  # type: ignore[type-arg]
    """A `DataLoader` over a `CursorBatchSampler`, with a generator of its own.

    Making an iterator draws a seed for the workers. From the global generator, that draw would differ between a resumed
    and an uninterrupted run; from one seeded by the epoch it does not.
    """

    batch_sampler: CursorBatchSampler

    def __init__(self, dataset: object, sampler: CursorBatchSampler, **options: object) -> None:
        super().__init__(dataset, batch_sampler=sampler, generator=torch.Generator(), **options)  # type: ignore[arg-type]
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)
        assert self.generator is not None
        self.generator.manual_seed(epoch)

    def start_at(self, micro_batch: int) -> None:
        self.batch_sampler.start_at(micro_batch)
