"""What stands between a loader and its samplers or stream: iterations that train are replayed up to the position."""

from __future__ import annotations

import functools
import itertools
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler

from checkpointing.data.generators import generator_state, generators_of, new_generator, set_generator_state, with_seed
from checkpointing.data.position import EpochStart, Position, ended_early
from checkpointing.process import rng

if TYPE_CHECKING:
    from checkpointing.data.cursor import LoaderCursor

logger = logging.getLogger("checkpointing")

_END = object()
# Packages whose samplers draw all they need when an epoch begins, or draw from generators of their own.
_KNOWN_PACKAGES = ("torch.", "accelerate.", "transformers.", "trl.", "sentence_transformers.", "checkpointing.")


class ReplayedSampler(BatchSampler):
    """A sampler's indices, each with its batch's seed, from the position on; it reports to the loader's cursor.

    No sample is loaded for the indices that are passed over. All other attributes are those of the sampler itself, so
    that loaders find `set_epoch`, `sampler` and the like.
    """

    def __init__(self, inner: Any, cursor: LoaderCursor) -> None:
        self._inner, self._cursor = inner, cursor

    def __getattr__(self, name: str) -> Any:
        if name in ("_inner", "_cursor"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        cursor = self._cursor
        if not cursor.take_iteration():
            # The script reads the data outside training.
            yield from self._inner
            return
        skip = cursor.begin_drawing()
        drawing = iter(self._inner)
        for number in itertools.count():
            before = rng.host_state() if cursor.watches_draws and number else None
            index = next(drawing, _END)
            if before is not None and not cursor.interleaves and _differ(before, rng.host_state()):
                cursor.interleaves = True
                logger.warning(
                    "%s draws indices from the global random number generators during an epoch: a resumed run "
                    "sees other samples in the rest of that epoch. Draw them when the epoch begins, or from a "
                    "generator of the sampler's own",
                    cursor.name,
                )
            if number == skip:
                cursor.check_replayed()
            if index is _END:
                if number < skip:
                    raise ended_early(cursor.name, number, skip)
                return
            cursor.drawn(number, index)
            if number >= skip and cursor.is_ours(number):
                yield with_seed(index, cursor.seed_of(number))


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
        """Wrap the creation of a torch DataLoader's iterators, in place; see `LoaderCursor.take_iteration`."""
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
        self._loader, self._iterate = loader, iterate

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_iterate"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._iterate()


class SamplerState:
    """What a sampler, and the samplers inside it, keep between epochs: generators, and counters that have changed.

    It is saved with a position, and restored before the order is replayed.
    """

    def __init__(self, sampler: Any) -> None:
        self._samplers = list(_chain(sampler))
        # The values in a fresh process.
        self._baseline = _counters(self._samplers)

    @property
    def name(self) -> str:
        """Class name of the innermost sampler, which determines the order."""
        return type(self._samplers[-1][1]).__name__

    @property
    def may_draw_globally(self) -> bool:
        """Whether a sampler of an unknown package takes part, which may use the host's generators in mid-epoch."""
        modules = [type(sampler).__module__ + "." for _, sampler in self._samplers]
        return not all(module.startswith(_KNOWN_PACKAGES) for module in modules)

    def generators(self) -> dict[str, Any]:
        """Return the states of the samplers' own generators, by path."""
        return {path: generator_state(generator) for path, generator in self._generators()}

    def counters(self) -> dict[str, Any]:
        """Return the samplers' simple attributes that have changed since this process made them, by path."""
        now = _counters(self._samplers)
        return {path: value for path, value in now.items() if self._baseline.get(path, value) != value}

    def restore(self, generators: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
        """Put generators and counters back to what `generators` and `counters` returned."""
        missing = dict(generators)
        for path, generator in self._generators():
            if path in missing:
                set_generator_state(generator, missing.pop(path))
        for path, state in missing.items():
            self._create_generator(path, state)
        samplers = dict(self._samplers)
        for path, value in counters.items():
            name, _, attribute = path.rpartition(".")
            if name in samplers:
                setattr(samplers[name], attribute, value)

    def _generators(self) -> Iterator[tuple[str, Any]]:
        return generators_of(*[sampler for _, sampler in self._samplers])

    def _create_generator(self, path: str, state: Any) -> None:
        """Create a generator that a sampler makes when its first epoch begins; in this process none has begun."""
        number, *names = path.split(".")
        owner: Any = self._samplers[int(number)][1] if int(number) < len(self._samplers) else None
        for name in names[:-1]:
            owner = getattr(owner, "__dict__", {}).get(name)
        if names and hasattr(owner, "__dict__") and owner.__dict__.get(names[-1]) is None:
            setattr(owner, names[-1], new_generator(state))


def _chain(sampler: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over a sampler and those inside it, by path, the outermost first."""
    path, seen = "order", set()
    while sampler is not None and id(sampler) not in seen:
        seen.add(id(sampler))
        yield path, sampler
        name = next((n for n in ("batch_sampler", "sampler") if getattr(sampler, n, None) is not None), None)
        path, sampler = (f"{path}.{name}", getattr(sampler, name)) if name else (path, None)


def _counters(samplers: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, sampler in samplers:
        attributes = getattr(sampler, "__dict__", {})
        found |= {f"{path}.{name}": value for name, value in attributes.items() if type(value) in (int, float, bool)}
    return found
