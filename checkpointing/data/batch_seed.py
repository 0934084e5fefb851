"""Randomness that depends on a batch's number alone.

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
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from checkpointing.data.generators import generators_of, reseed

# get_bit_generator and set_bit_generator are missing in numpy's stubs.
_NUMPY: Any = np.random
_SPARE_BIT_GENERATOR = np.random.MT19937()


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
def drawing_by(seed: int, *owners: object) -> Iterator[None]:
    """Seed the host's generators for the duration of the context, and restore them afterwards.

    Args:
        seed: Seed of Python's, numpy's and torch's CPU generators.
        owners: Objects whose own generators are seeded as well; those are not restored.
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
    for path, generator in generators_of(*owners):
        reseed(generator, seed ^ int.from_bytes(hashlib.blake2b(path.encode(), digest_size=4).digest()))
    try:
        yield
    finally:
        random.setstate(python)
        torch.random.set_rng_state(cpu)
        _NUMPY.set_bit_generator(original)
        if words["has_gauss"]:
            np.random.set_state(words)


_fetch_unseeded: Any = _MapDatasetFetcher.fetch


def _fetch(self: Any, index: Any) -> Any:
    if not isinstance(index, _Seeded):
        return _fetch_unseeded(self, index)
    with drawing_by(index.seed, self.dataset, self.collate_fn):
        return _fetch_unseeded(self, _PLAIN[type(index)](index))


_MapDatasetFetcher.fetch = _fetch  # type: ignore[method-assign]
