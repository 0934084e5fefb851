"""Iterations that train are replayed up to the position, others are left alone; the state of samplers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from checkpointing.data.iteration import ReplayedSampler, ReplayedStream, ResumedLoader, SamplerState
from checkpointing.data.position import EpochStart, Position
from checkpointing.errors import CheckpointError
from checkpointing.process import rng


class Order:
    """A position that passes over some batches."""

    def __init__(self, skip: int = 0, *, trains: bool = True) -> None:
        self.skip, self.trains = skip, trains
        self.interleaves, self.watches_draws, self.name = False, False, "Sampler"
        self.events: list[Any] = []
        self.others: set[int] = set()

    def take_iteration(self) -> bool:
        return self.trains

    def begin_drawing(self) -> int:
        return self.skip

    def drawn(self, number: int, index: Any) -> None:
        self.events.append((number, index))

    def check_replayed(self) -> None:
        self.events.append("checked")

    def is_ours(self, number: int) -> bool:
        return number not in self.others

    def seed_of(self, number: int) -> int:
        return 100 + number


def replayed(inner: Any, order: Any) -> ReplayedSampler:
    return ReplayedSampler(inner, order)


def test_batches_of_other_ranks_are_counted_and_passed_over() -> None:
    order = Order(skip=1)
    order.others = {2}
    found = list(replayed([[0], [1], [2], [3]], order))
    assert found == [[1], [3]] and [one.seed for one in found] == [101, 103]
    assert order.events[-2:] == [(2, [2]), (3, [3])]


def test_the_first_batch_after_the_position_is_returned_once_the_order_was_checked() -> None:
    order = Order(skip=2)
    found = list(replayed([[0], [1], [2]], order))
    assert found == [[2]] and found[0].seed == 102
    assert order.events == [(0, [0]), (1, [1]), "checked", (2, [2])]


def test_an_iteration_beside_training_carries_no_seeds_and_reports_nothing() -> None:
    order = Order(skip=2, trains=False)
    found = list(replayed([[0], [1]], order))
    assert found == [[0], [1]] and not hasattr(found[0], "seed") and order.events == []


def test_an_order_that_ends_before_the_position_is_refused() -> None:
    assert list(replayed([[0]], Order(skip=1))) == []
    with pytest.raises(CheckpointError, match="ended after 1 batches of an epoch; the checkpoint was made after 2"):
        list(replayed([[0]], Order(skip=2)))


def test_all_else_is_the_samplers_own() -> None:
    class Sampler(list[Any]):
        batch_size = 3

    sampler = replayed(Sampler([[0]]), Order())
    assert sampler.batch_size == 3 and len(sampler) == 1
    with pytest.raises(AttributeError):
        _ = sampler.missing


class Drawing(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (random.random() for _ in range(4))


def test_a_stream_draws_from_generators_of_its_own() -> None:
    loader: Any = DataLoader(Drawing(), batch_size=None)
    trains = [True]
    stream = ReplayedStream(loader, lambda: trains[0], lambda: None)
    random.seed(1)
    expected = [random.random() for _ in range(4)]
    random.seed(1)
    torch.manual_seed(1)
    iterator = iter(loader)
    before = random.getstate()
    assert list(iterator) == expected
    assert random.getstate() == before and stream.start is not None
    # A look into the data draws as it would without a cursor.
    trains[0] = False
    assert list(loader) == expected and random.getstate() != before


def test_a_stream_whose_loader_was_set_to_the_position_draws_on_from_it() -> None:
    loader: Any = DataLoader(Drawing(), batch_size=None)
    random.seed(7)
    at_position = rng.host_state()
    random.seed(1)
    position = Position(0, 2, start=EpochStart(rng.host_state()), loader={}, stream=at_position)
    ReplayedStream(loader, lambda: True, lambda: position)
    random.seed(99)
    assert next(iter(loader)) == random.Random(7).random()


def test_a_resumed_loader_has_the_loaders_attributes() -> None:
    resumed = ResumedLoader([1, 2, 3], lambda: iter([3]))
    assert list(resumed) == [3] and len(resumed) == 3 and resumed.count(1) == 1


class Counting:
    """Makes a generator when its first epoch begins."""

    def __init__(self) -> None:
        self.calls = 0
        self.generator: Any = None

    def begin(self) -> None:
        self.calls += 1
        if self.generator is None:
            self.generator = np.random.Generator(np.random.PCG64(5))


class Outer:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler


def test_what_has_changed_since_a_process_began_is_restored_in_another() -> None:
    first = Outer(Counting())
    state = SamplerState(first)
    assert (state.name, state.counters(), state.generators()) == ("Counting", {}, {})
    first.sampler.begin()
    first.sampler.generator.random()
    assert state.counters() == {"order.sampler.calls": 1}
    second = Outer(Counting())
    SamplerState(second).restore(state.generators(), state.counters())
    assert second.sampler.calls == 1
    # The generator did not exist yet.
    assert second.sampler.generator.random() == first.sampler.generator.random()


def test_an_existing_generator_is_set() -> None:
    samplers = [RandomSampler(range(9), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    one, other = (SamplerState(BatchSampler(sampler, 3, False)) for sampler in samplers)
    other.restore(one.generators(), {})
    assert list(samplers[0]) == list(samplers[1])


def test_what_a_sampler_does_not_have_is_ignored() -> None:
    sampler = Counting()
    SamplerState(sampler).restore(
        {"7.generator": None, "0.no.such": None}, {"order.sampler.calls": 3, "elsewhere.calls": 4}
    )
    assert sampler.calls == 0


def test_only_samplers_of_unknown_packages_are_watched() -> None:
    assert not SamplerState(BatchSampler(RandomSampler(range(9)), 3, False)).may_draw_globally
    assert SamplerState(Outer(RandomSampler(range(9)))).may_draw_globally
