"""Generators that objects hold, and what is drawn while a batch is made, which depends on its number alone."""

from __future__ import annotations

import functools
import pickle
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from checkpointing.data.generators import (
    batch_seed,
    drawing_by,
    generator_state,
    generators_of,
    new_generator,
    reseed,
    set_generator_state,
    with_seed,
)

KINDS: list[Any] = [
    torch.Generator,
    random.Random,
    lambda: np.random.RandomState(1),
    lambda: np.random.Generator(np.random.MT19937(1)),
    lambda: np.random.default_rng(1),
]


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random() if hasattr(generator, "random") else generator.rand())


@pytest.mark.parametrize("make", KINDS)
def test_any_kind_is_seeded_saved_restored_and_created(make: Any) -> None:
    generator = make()
    reseed(generator, 2**40 + 7)
    state = generator_state(generator)
    expected = draw(generator)
    set_generator_state(generator, state)
    assert draw(generator) == expected == draw(new_generator(state))
    reseed(generator, 2**40 + 7)
    assert draw(generator) == expected


def test_generators_are_found_in_attributes_closures_partials_and_methods() -> None:
    generator = torch.Generator()

    class Owner:
        def __init__(self) -> None:
            self.generator = generator

        def method(self) -> None:
            pass

    def closure() -> object:
        return generator

    owners = [
        generator,
        Owner(),
        Owner().method,
        closure,
        functools.partial(print, generator),
        functools.partial(print, key=generator),
        SimpleNamespace(inner=Owner()),
    ]
    for owner in owners:
        assert [found for _, found in generators_of(owner)] == [generator]
    # Once, by the path where it was found first.
    assert [path for path, _ in generators_of(*owners)] == ["0"]


@pytest.mark.parametrize("state", [{"bit_generator": "Unknown"}, {}, (), 3, torch.zeros(3, dtype=torch.uint8)])
def test_a_state_of_no_generator_is_refused(state: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, RuntimeError, IndexError)):
        new_generator(state)


def seeded() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def test_the_generators_are_as_before_whatever_a_batch_draws() -> None:
    def twice() -> list[float]:
        return [float(np.random.normal()), random.random(), float(torch.rand(()))]

    seeded()
    expected = [twice() for _ in range(4)]
    seeded()
    found = []
    for number in range(4):
        found.append(twice())
        # The second normal of a pair is not drawn again.
        with drawing_by(number):
            first = (np.random.normal(size=3).tolist(), random.random(), float(torch.rand(())))
            with drawing_by(number):
                assert (np.random.normal(size=3).tolist(), random.random(), float(torch.rand(()))) == first
            np.random.rand()
    assert found == expected


def test_generators_of_the_owners_are_seeded_too() -> None:
    class Owner:
        def __init__(self) -> None:
            self.first, self.second = torch.Generator(), random.Random()

    owner = Owner()
    drawn = []
    for _ in range(2):
        with drawing_by(3, generators_of(owner)):
            drawn.append((float(torch.rand((), generator=owner.first)), owner.second.random()))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("index", [[1, 2], (1, 2), 7])
def test_an_index_carries_its_seed_to_the_process_that_fetches_it(index: object) -> None:
    carried = pickle.loads(pickle.dumps(with_seed(index, 42)))
    assert carried == index and carried.seed == 42


def test_the_data_set_gets_the_index_as_the_sampler_made_it() -> None:
    seen: list[type] = []

    class Rows:
        def __getitem__(self, index: object) -> float:
            seen.append(type(index))
            return random.random()

    fetcher: Any = _MapDatasetFetcher(Rows(), False, lambda row: row, False)
    first, again = (fetcher.fetch(with_seed(3, 42)) for _ in range(2))
    assert first == again and seen == [int, int]
    assert with_seed("name", 42) == "name" and not hasattr(with_seed("name", 42), "seed")


def test_epochs_batches_and_ranks_draw_differently() -> None:
    seeds = {batch_seed(1, epoch, number, rank) for epoch in range(3) for number in range(3) for rank in range(3)}
    assert len(seeds) == 27 and all(0 <= seed < 2**56 for seed in seeds)


class Lazy(torch.utils.data.Dataset[float]):
    """A data set that makes its generator when it is first used, as transformers' collator with a seed does."""

    def __init__(self) -> None:
        self.rng: np.random.Generator | None = None

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> float:
        self.rng = self.rng or np.random.default_rng(42)
        return float(self.rng.normal())


def test_a_generator_that_the_first_batch_makes_draws_by_the_batch_seed() -> None:
    """It began again with each process: the first batch after every restart was another one."""

    def batches(first: int) -> list[Any]:
        fetcher: Any = _MapDatasetFetcher(Lazy(), True, list, False)
        return [fetcher.fetch(with_seed([number], number)) for number in range(first, 6)]

    assert batches(0)[3:] == batches(3)
