"""Random number generators that samplers and data sets hold as attributes, and the seeds that batches are made with.

What a data set or a collate function draws while it makes a batch comes from generators that are seeded by the batch's
number, in the main process as in workers. It depends neither on where a process began to read nor on the number of
workers, and it takes no draws away from training.

Importing this module wraps `fetch` of torch's map-style fetcher: DataLoader offers no hook around the making of one
batch. Indices without a seed are fetched as before. A worker process imports the module when it receives the first
index that carries a seed.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from checkpointing.process.reachable import reachable

_NUMPY_BIT_GENERATORS = (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
# get_bit_generator and set_bit_generator are missing in numpy's stubs.
_NUMPY: Any = np.random
_SPARE_BIT_GENERATOR = np.random.MT19937()


GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def generators_of(*owners: object) -> Iterator[tuple[str, Any]]:
    """Iterate over the generators that can be reached from objects, each one once, with its path."""
    roots = {str(number): owner for number, owner in enumerate(owners)}
    return ((found.path, found.value) for found in reachable(roots) if isinstance(found.value, GENERATORS))


def reseed(generator: Any, seed: int) -> None:
    """Seed a generator of any supported kind."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    else:
        generator.seed(seed % 2**32)


def generator_state(generator: Any) -> Any:
    """Return the state of a generator, made of plain values and tensors."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return without_arrays(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return without_arrays(generator.get_state())
    return generator.getstate()


def set_generator_state(generator: Any, state: Any) -> None:
    """Restore what `generator_state` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = with_arrays(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(with_arrays(state))
    else:
        generator.setstate(state)


def new_generator(state: Any) -> Any:
    """Create a generator of the kind that a state belongs to, in that state."""
    if isinstance(state, torch.Tensor):
        generator: Any = torch.Generator()
    elif isinstance(state, Mapping):
        kinds = {kind.__name__: kind for kind in _NUMPY_BIT_GENERATORS}
        generator = np.random.Generator(kinds[state["bit_generator"]]())
    else:
        generator = np.random.RandomState() if isinstance(state[0], str) else random.Random()
    set_generator_state(generator, state)
    return generator


def without_arrays(state: Any) -> Any:
    """Replace numpy arrays by plain values, so that any reader with `weights_only` can read the state."""
    if isinstance(state, Mapping):
        return {name: without_arrays(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return tuple(without_arrays(value) for value in state)
    if isinstance(state, np.ndarray):
        return {"array": state.tolist(), "dtype": state.dtype.str}
    return state.item() if isinstance(state, np.generic) else state


def with_arrays(state: Any) -> Any:
    """Undo `without_arrays`."""
    if isinstance(state, Mapping):
        if state.keys() == {"array", "dtype"}:
            return np.array(state["array"], dtype=state["dtype"])
        return {name: with_arrays(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return tuple(with_arrays(value) for value in state)
    return state


class _Seeded:
    """An index with the seed of what is drawn while its batch is made."""

    seed: int


class _SeededList(_Seeded, list[Any]):
    pass


class _SeededTuple(_Seeded, tuple[Any, ...]):
    pass


class _SeededInt(_Seeded, int):
    pass


# By the type that the sampler returns. Indices of other types reach the data set without a seed.
_SEEDED: dict[type, Any] = {list: _SeededList, tuple: _SeededTuple, int: _SeededInt}
_PLAIN: dict[type, Any] = {seeded: plain for plain, seeded in _SEEDED.items()}


def with_seed(index: Any, seed: int) -> Any:
    """Return the same index, carrying a seed to the process that fetches it."""
    # Batch samplers may return a subclass of list.
    plain = list if isinstance(index, list) else type(index)
    if plain not in _SEEDED:
        return index
    seeded = _SEEDED[plain](index)
    seeded.seed = seed
    return seeded


def batch_seed(seed: int, epoch: int, number: int, rank: int) -> int:
    """Return the seed of what a rank draws while it makes batch `number` of an epoch: 56 bits."""
    text = f"{seed} {epoch} {number} {rank}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


@contextlib.contextmanager
def drawing_by(seed: int, generators: Iterable[tuple[str, Any]] = ()) -> Iterator[None]:
    """Seed Python's, numpy's and torch's CPU generators for the duration of the context; restore them afterwards.

    Args:
        seed: 56 bits.
        generators: Others, by path, that are seeded as well, and not restored.
    """
    python, cpu = random.getstate(), torch.random.get_rng_state()
    # Copying numpy's words back and forth is slow, and this runs once per batch: the bit generator is exchanged for
    # another one instead. That loses only a second normal that was drawn already, which is restored below.
    words, original = np.random.get_state(legacy=False), _NUMPY.get_bit_generator()
    _NUMPY.set_bit_generator(_SPARE_BIT_GENERATOR if original is not _SPARE_BIT_GENERATOR else np.random.MT19937())
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # `torch.manual_seed` would seed the devices as well.
    torch.default_generator.manual_seed(seed)
    for path, generator in generators:
        reseed(generator, seed ^ int.from_bytes(hashlib.blake2b(path.encode(), digest_size=4).digest()))
    try:
        yield
    finally:
        random.setstate(python)
        torch.random.set_rng_state(cpu)
        _NUMPY.set_bit_generator(original)
        if words["has_gauss"]:
            np.random.set_state(words)


class _Found:
    """The generators of a data set and its collate function, which are searched for again while they may be made.

    Args:
        owners: Data set and collate function.
    """

    def __init__(self, *owners: object) -> None:
        self._owners = owners
        self._num_batches = 0
        self.generators = list(generators_of(*owners))

    def end_of_batch(self) -> bool:
        """Search again after batch 1, 2, 4, 8, and so on; return whether the first batch has made any.

        These did not draw by the batch's seed.
        """
        self._num_batches += 1
        if self._num_batches & (self._num_batches - 1):
            return False
        known = {id(generator) for _, generator in self.generators}
        self.generators = list(generators_of(*self._owners))
        return self._num_batches == 1 and any(id(generator) not in known for _, generator in self.generators)


_fetch_unseeded: Any = _MapDatasetFetcher.fetch


def _fetch(self: Any, index: Any) -> Any:
    if not isinstance(index, _Seeded):
        return _fetch_unseeded(self, index)
    found = vars(self).get(_FOUND)
    if found is None:
        found = vars(self)[_FOUND] = _Found(self.dataset, self.collate_fn)
    plain = _PLAIN[type(index)](index)
    with drawing_by(index.seed, found.generators):
        batch = _fetch_unseeded(self, plain)
    if found.end_of_batch():
        with drawing_by(index.seed, found.generators):
            batch = _fetch_unseeded(self, plain)
    return batch


_FOUND = "_checkpointing_generators"
_MapDatasetFetcher.fetch = _fetch  # type: ignore[method-assign]
