"""Generators that objects hold: found, saved, restored and created."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from checkpointing.data.generators import generator_state, generators_of, new_generator, reseed, set_generator_state

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


def test_the_search_has_a_depth_and_ends_in_cycles() -> None:
    deep = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=random.Random())))
    assert list(generators_of(deep)) == []
    deep.self = deep
    assert list(generators_of(deep)) == []


@pytest.mark.parametrize("state", [{"bit_generator": "Unknown"}, {}, (), 3, torch.zeros(3, dtype=torch.uint8)])
def test_a_state_of_no_generator_is_refused(state: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, RuntimeError, IndexError)):
        new_generator(state)


def test_generators_in_a_composition_of_transforms_are_found_and_those_in_data_are_not() -> None:
    """They were neither seeded for each batch nor saved: a resumed run saw other augmentations."""
    flips, crops, nested = (SimpleNamespace(rng=np.random.default_rng(1)) for _ in range(3))
    composition = SimpleNamespace(transforms=[flips, crops, [nested], 3])
    found = dict(
        generators_of(SimpleNamespace(transform=composition, rows=[SimpleNamespace(rng=random.Random())] * 99))
    )
    assert list(found.values()) == [flips.rng, crops.rng]
    assert list(found) == ["0.transform.transforms[0].rng", "0.transform.transforms[1].rng"]


def test_a_long_chain_of_objects_is_not_searched_to_its_end() -> None:
    chain = SimpleNamespace(children=[])
    for _ in range(5000):
        chain = SimpleNamespace(children=[chain])
    assert list(generators_of(chain)) == []
