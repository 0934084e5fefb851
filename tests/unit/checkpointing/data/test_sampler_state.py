"""Generators and counters of a chain of samplers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler

from checkpointing.data.sampler_state import SamplerState


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
