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

Gather = Callable[[Any], list[Any]]


class StepFigures:
    """What TRL measures of one step's micro-batches.

    TRL has what it measures gathered over the ranks, micro-batch by micro-batch, and keeps the results in lists. Here
    each rank measures its own, and after the step all have everyone's, in an order that is the same for any number of
    ranks.

    Args:
        trainer: One of TRL's.
        gather: Returns every rank's value of its argument, by rank.
    """

    def __init__(self, trainer: Any, gather: Gather) -> None:
        self._trainer, self._gather = trainer, gather
        self._found: dict[tuple[int, int], tuple[dict[str, list[float]], float]] = {}

    @staticmethod
    def are_kept_by(trainer: Any) -> bool:
        """Return whether a trainer keeps figures as TRL's do."""
        return isinstance(getattr(trainer, "_metrics", None), dict) and hasattr(trainer, "_total_train_tokens")

    def begin(self) -> None:
        """Begin a step."""
        self._found = {}

    @contextlib.contextmanager
    def of(self, place: tuple[int, int] | None) -> Iterator[None]:
        """Take what is measured meanwhile out of the trainer's lists.

        Args:
            place: Round and virtual rank of the micro-batch; None for one that does not count.
        """
        trainer, figures = self._trainer, self._trainer._metrics["train"]
        tokens = trainer._total_train_tokens
        before = {name: len(values) for name, values in figures.items() if name != _TOTAL}
        total = figures.get(_TOTAL)
        try:
            yield
        finally:
            added = {name: values[before.get(name, 0) :] for name, values in figures.items() if name != _TOTAL}
            if place is not None:
                self._found[place] = (added, trainer._total_train_tokens - tokens)
            for name in added:
                del figures[name][before.get(name, 0) :]
            # TRL takes the mean of each list, which an empty one has not.
            for name in [name for name, values in figures.items() if not values]:
                del figures[name]
            trainer._total_train_tokens = tokens
            if total is not None:
                figures[_TOTAL] = total
            else:
                figures.pop(_TOTAL, None)

    def end(self) -> None:
        """Give the trainer what all ranks have measured in this step; every rank calls it."""
        trainer, figures = self._trainer, self._trainer._metrics["train"]
        found = itertools.chain(*(mine.items() for mine in self._gather(self._found)))
        for _, (added, tokens) in sorted(found, key=lambda item: item[0]):
            for name, values in added.items():
                figures[name] += values
            trainer._total_train_tokens += tokens
        figures[_TOTAL] = [trainer._total_train_tokens]


def merge_evaluation(figures: dict[str, list[float]], num_batches: int, gather: Gather) -> None:
    """Put the figures that ranks have of their batches of an evaluation into the data's order; every rank calls it.

    Args:
        figures: TRL's, with one value for each of this rank's batches; changed in place.
        num_batches: Of the data. Ranks have repeated some, so that each had equally many.
        gather: Returns every rank's value of its argument, by rank. They took turns.
    """
    everyone = gather(dict(figures))
    for name in figures:
        if name != _TOTAL:
            in_order = itertools.chain(*zip(*(found[name] for found in everyone), strict=True))
            figures[name] = list(in_order)[:num_batches]


def fill_last_batch(loader: Any) -> None:
    """Have an evaluation's last batch filled up, as accelerate does it wherever there are several ranks.

    Args:
        loader: Of a single rank, prepared by accelerate.
    """
    base = loader.__dict__.get("base_dataloader", loader)
    plain = base.batch_sampler
    if type(plain) is BatchSampler and not plain.drop_last:
        # DataLoader refuses to have its sampler replaced, as its iterators may hold the old one; there are none yet.
        base.__dict__["batch_sampler"] = BatchSamplerShard(plain, 1, 0)


@contextlib.contextmanager
def as_virtual_ranks(accelerator: Any, count: int, *, local: bool = False) -> Iterator[None]:
    """Have an accelerator say that there are so many processes.

    Args:
        accelerator: Of a trainer.
        count: Number of processes.
        local: Gather nothing: what TRL measures of a micro-batch remains that of this rank.
    """
    cls = type(accelerator)
    members: dict[str, Any] = {"num_processes": property(lambda _: count)}
    if local:
        members |= {"gather": lambda _, own: own, "gather_for_metrics": lambda _, own, *__, **___: own}
    accelerator.__class__ = type(cls.__name__, (cls,), members)
    try:
        yield
    finally:
        accelerator.__class__ = cls
