"""What is drawn while a batch is made depends on its number alone."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from checkpointing.data.batch_seed import batch_seed, drawing_by, with_seed


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
        with drawing_by(3, owner):
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
