"""What a Trainer measures while virtual ranks compute: TRL's figures, counts of tokens, and evaluations."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

# A running total, where TRL's other figures are lists of which it logs the mean.
_TOTAL = "num_tokens"

# Returns the value of its argument on every rank that has measured other micro-batches, by rank.
GatherObjects = Callable[[Any], list[Any]]


class Figures:
    """What TRL measures of the micro-batches of one step, or of one evaluation.

    TRL has what it measures gathered over the ranks, micro-batch by micro-batch, and keeps the results in lists. Here
    each rank measures its own, and in the end all have everyone's, in an order that is the same for any number of
    ranks. `mode` is `train` or `eval`.
    """

    def __init__(self, trainer: Any, mode: str) -> None:
        self._trainer, self._mode = trainer, mode
        self._found: dict[tuple[int, ...], tuple[dict[str, list[float]], float]] = {}

    @staticmethod
    def are_kept_by(trainer: Any) -> bool:
        """Return whether a trainer keeps figures as TRL's do."""
        return isinstance(getattr(trainer, "_metrics", None), dict) and hasattr(trainer, "_total_train_tokens")

    @contextlib.contextmanager
    def of(self, place: tuple[int, ...] | None) -> Iterator[None]:
        """Take what is measured meanwhile out of the trainer's lists; None is the place of what does not count."""
        trainer, figures = self._trainer, self._trainer._metrics[self._mode]
        tokens = trainer._total_train_tokens
        before = {name: list(values) for name, values in figures.items()}
        try:
            yield
        finally:
            if place is not None:
                added = {name: values[len(before.get(name, ())) :] for name, values in figures.items()}
                self._found[place] = (added, trainer._total_train_tokens - tokens)
            # TRL takes the mean of each list, which an empty one has not.
            figures.clear()
            figures.update(before)
            trainer._total_train_tokens = tokens

    def merge(self, gather: GatherObjects, below: int | None = None) -> None:
        """Give the trainer what all ranks have measured; every rank calls it.

        From `below` on, micro-batches are repetitions, so that each rank had equally many.
        """
        trainer, figures = self._trainer, self._trainer._metrics[self._mode]
        found = itertools.chain(*(mine.items() for mine in gather(self._found)))
        for place, (added, tokens) in sorted(found, key=lambda item: item[0]):
            if below is not None and place[0] >= below:
                continue
            trainer._total_train_tokens += tokens
            for name, values in added.items():
                figures[name] = [trainer._total_train_tokens] if name == _TOTAL else [*figures.get(name, ()), *values]
        self._found = {}


class EvaluationFigures:
    """The figures of one evaluation, or prediction."""

    def __init__(self, trainer: Any, loader: Any, rank: int, world_size: int) -> None:
        self._figures, self._num_batches = Figures(trainer, "eval"), 0
        # Ranks take turns at the batches of a loader that accelerate has prepared. Of any other one, each has all.
        self._is_shared = "base_dataloader" in loader.__dict__
        self._first, self._stride = (rank, world_size) if self._is_shared else (0, 1)
        sampler = getattr(loader, "batch_sampler", None)
        self._below = len(sampler.batch_sampler) if isinstance(sampler, BatchSamplerShard) else None

    def of_next(self) -> contextlib.AbstractContextManager[None]:
        """Take what is measured meanwhile, of the next batch."""
        place = (self._first + self._stride * self._num_batches,)
        self._num_batches += 1
        return self._figures.of(place)

    def merge(self, gather: GatherObjects) -> None:
        """Give the trainer what all ranks have measured; every rank calls it."""
        self._figures.merge(gather if self._is_shared else lambda mine: [mine], self._below)


def fill_last_batch(loader: Any) -> None:
    """Have the last batch of a single rank's evaluation filled up, as accelerate does it where there are several."""
    # Not prepared by accelerate, it remains as it is.
    base = loader.__dict__.get("base_dataloader")
    plain = getattr(base, "batch_sampler", None)
    if base is not None and type(plain) is BatchSampler and not plain.drop_last:
        # DataLoader refuses to have its sampler replaced, as its iterator, kept with its workers, has the old one.
        base.__dict__.update(batch_sampler=BatchSamplerShard(plain, 1, 0), _iterator=None)
