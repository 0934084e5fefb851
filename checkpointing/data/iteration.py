"""What stands between a loader and its sampler or stream: iterations that train are replayed up to the position."""

from __future__ import annotations

import functools
import itertools
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import BatchSampler

from checkpointing.data.batch_seed import with_seed
from checkpointing.data.position import EpochStart, Position
from checkpointing.errors import CheckpointError
from checkpointing.process import rng

logger = logging.getLogger("checkpointing")

_END = object()


class Order(Protocol):
    """What an iteration needs to know of the position, and reports to it."""

    interleaves: bool

    @property
    def name(self) -> str:
        """What gives the order, for messages."""

    @property
    def watches_draws(self) -> bool:
        """Whether the sampler may draw from the host's generators in mid-epoch."""

    def take_iteration(self) -> bool:
        """Return whether the iteration that begins now is the one that trains."""

    def begin_drawing(self) -> int:
        """Restore what the order depends on; return the number of batches to pass over."""

    def drawn(self, number: int, index: Any) -> None:
        """Record that batch `number` of this iteration was drawn."""

    def check_replayed(self) -> None:
        """Check that the batches passed over are those of the checkpoint."""

    def is_ours(self, number: int) -> bool:
        """Return whether this rank computes batch `number`; another one does otherwise."""

    def seed_of(self, number: int) -> int:
        """Return the seed of batch `number` of this epoch."""


class ReplayedSampler(BatchSampler):
    """A sampler's indices, each with its batch's seed, from the position on.

    No sample is loaded for the indices that are passed over. All other attributes are those of the sampler itself, so
    that loaders find `set_epoch`, `sampler` and the like.
    """

    def __init__(self, inner: Any, order: Order) -> None:
        """Put `order` between a loader and its sampler, `inner`."""
        self._inner, self._order = inner, order

    def __getattr__(self, name: str) -> Any:
        if name in ("_inner", "_order"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        order = self._order
        if not order.take_iteration():
            # The script reads the data outside training.
            yield from self._inner
            return
        skip = order.begin_drawing()
        drawing = iter(self._inner)
        for number in itertools.count():
            before = rng.host_state() if order.watches_draws and number else None
            index = next(drawing, _END)
            if before is not None and not order.interleaves and _differ(before, rng.host_state()):
                order.interleaves = True
                logger.warning(
                    "%s draws indices from the global random number generators during an epoch: a resumed run "
                    "sees other samples in the rest of that epoch. Draw them when the epoch begins, or from a "
                    "generator of the sampler's own",
                    order.name,
                )
            if number == skip:
                order.check_replayed()
            if index is _END:
                if number < skip:
                    raise CheckpointError(
                        f"{order.name} ended after {number} batches of an epoch; the checkpoint was made after "
                        f"{skip}: the data set or its sampler has changed. Use those that wrote it, or another "
                        "output_dir"
                    )
                return
            order.drawn(number, index)
            if number >= skip and order.is_ours(number):
                yield with_seed(index, order.seed_of(number))


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return (
        one["python"] != other["python"]
        or not torch.equal(one["cpu"], other["cpu"])
        or one["numpy"][2:] != other["numpy"][2:]
        or not np.array_equal(one["numpy"][1], other["numpy"][1])
    )


class ReplayedStream:
    """A data set without a length, which is read again up to the position.

    In the main process, what it draws comes from generator states of its own, which begin as the host's are when the
    epoch begins. So it takes no draws away from training.

    Attributes:
        start: What the epoch that is read now began with; None before the first one.
        generators: Host generator states that the stream draws from, after the last fetch.
    """

    def __init__(self, loader: Any, take_iteration: Callable[[], bool], take_position: Callable[[], Position | None]):
        """Wrap the creation of a loader's iterators.

        Args:
            loader: The torch DataLoader; changed in place.
            take_iteration: Returns whether the iteration that begins now is the one that trains.
            take_position: Returns the position to resume from, once.
        """
        self.start: EpochStart | None = None
        self.generators: Mapping[str, Any] | None = None
        self._make_iterator: Callable[[], Any] = loader._get_iterator
        self._take_iteration, self._take_position = take_iteration, take_position
        loader.__dict__["_get_iterator"] = self._get_iterator

    def _get_iterator(self) -> Any:
        if not self._take_iteration():
            return self._make_iterator()
        position = self._take_position()
        if position is not None and position.start is not None:
            rng.set_host_state(dict(position.start.host))
        self.start = EpochStart(rng.host_state())
        self.generators = self.start.host
        iterator: Any = self._make_iterator()
        fetcher = getattr(iterator, "_dataset_fetcher", None)
        if fetcher is not None:
            fetcher.fetch = functools.partial(self._fetch, fetcher.fetch)
        if position is not None and position.loader is not None and position.stream is not None:
            # The loader was set to the position, not read up to it.
            self.generators = position.stream
        return iterator

    def _fetch(self, fetch: Callable[[Any], Any], index: Any) -> Any:
        training = rng.host_state()
        assert self.generators is not None
        _set_trusted(self.generators)
        try:
            return fetch(index)
        finally:
            self.generators = rng.host_state()
            _set_trusted(training)


def _set_trusted(state: Mapping[str, Any]) -> None:
    """Restore a state that this process has taken itself: unlike `rng.set_host_state`, without checks."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.random.set_rng_state(state["cpu"])


class ResumedLoader:
    """A stream's batches behind the position, once; all other attributes are those of the loader."""

    def __init__(self, loader: Any, iterate: Callable[[], Iterator[Any]]) -> None:
        """Iterate over `loader` through `iterate`."""
        self._loader, self._iterate = loader, iterate

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_iterate"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._iterate()
