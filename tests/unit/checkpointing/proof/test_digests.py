"""What goes into a step's digests: a change of anything that a step computes from changes them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from checkpointing.format.step_record import float_bits
from checkpointing.proof import digests
from checkpointing.proof.digests import (
    BatchDigest,
    ParameterSamples,
    generator_digests,
    learning_rate_bits,
)


def digest_of(batch: object) -> BatchDigest:
    digest = BatchDigest()
    digest.add_batch(batch)
    return digest


class Pair(NamedTuple):
    ids: torch.Tensor
    mask: torch.Tensor


def tokens() -> torch.Tensor:
    return torch.arange(64).reshape(4, 16)


def changed(place: int) -> torch.Tensor:
    ids = tokens()
    ids.view(-1)[place] += 1
    return ids


BATCHES: list[Any] = [
    tokens(),
    {"ids": tokens()},
    {"other": tokens()},
    {"ids": tokens(), "mask": torch.ones(4, 16)},
    Pair(tokens(), torch.zeros(4, 16)),
    ((tokens(),), {"labels": tokens()}),
    tokens().int(),
    tokens().reshape(16, 4),
    tokens().flip(0),
    changed(0),
    changed(63),
    torch.randn(3, 500, 500, generator=torch.Generator().manual_seed(0)),
    torch.randn(3, 500, 500, generator=torch.Generator().manual_seed(1)),
    torch.zeros(4, dtype=torch.bfloat16),
    np.arange(8),
    ["some text"],
    ["other text"],
    [1, 2],
    torch.zeros(0),
]


def test_batches_differ_by_every_number_shape_type_and_name() -> None:
    assert len({digest_of(batch).value() for batch in BATCHES}) == len(BATCHES)


@pytest.mark.parametrize("number", range(len(BATCHES)))
def test_an_equal_batch_has_an_equal_digest(number: int) -> None:
    assert digest_of(BATCHES[number]).value() == digest_of(BATCHES[number]).value()


def test_a_batch_is_what_it_was_when_it_entered_the_model() -> None:
    """Loops reuse the memory of their batches."""
    batch = tokens()
    digest, expected = digest_of(batch), digest_of(tokens()).value()
    batch.zero_()
    assert digest.value() == expected


def test_the_length_of_a_batch_is_that_of_its_first_tensor() -> None:
    assert digest_of({"input_ids": tokens(), "labels": tokens()}).tokens == 64


def test_the_lengths_of_micro_batches_add_up() -> None:
    digest = digest_of(tokens())
    digest.add_batch({"ids": tokens()})
    assert digest.tokens == 128 and digest.value() != digest_of(tokens()).value()


def test_of_an_unknown_batch_nothing_is_known() -> None:
    assert not digest_of(object()).count and digest_of(tokens()).count


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("torch", lambda: torch.rand(1)),
        ("numpy", lambda: np.random.rand()),
        ("numpy", lambda: np.random.shuffle([1, 2, 3])),
        ("python", random.random),
        ("python", lambda: random.gauss(0, 1)),
    ],
)
def test_a_draw_changes_the_digest_of_its_generator_and_no_other(name: str, draw: Callable[[], object]) -> None:
    before = generator_digests()
    assert generator_digests() == before
    draw()
    after = generator_digests()
    assert {key for key in before if before[key] != after[key]} == {name}


@pytest.mark.parametrize("is_laid_out", [True, False])
def test_pythons_generator_is_the_same_however_it_is_read(is_laid_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generator_digests()["python"]
    monkeypatch.setattr(digests, "_is_laid_out", lambda: is_laid_out)
    assert generator_digests()["python"] == expected


def test_a_generator_of_another_kind_is_looked_at_too() -> None:
    original = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
    try:
        before = generator_digests()
        np.random.rand()
        assert generator_digests()["numpy"] != before["numpy"]
    finally:
        np.random.set_bit_generator(original)  # type: ignore[attr-defined]


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    shapes: list[tuple[int, ...]] = [(50, 40), (7,), (1,), (3, 5)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


@pytest.mark.parametrize("number", range(4))
def test_an_update_of_any_parameter_is_seen(number: int) -> None:
    own, samples = parameters(), ParameterSamples()
    before = samples.read(own).value()
    with torch.no_grad():
        own[number].add_(1e-4)
    assert samples.read(own).value() != before


def test_parameters_whose_memory_was_exchanged_are_read_where_they_are() -> None:
    own, samples = parameters(), ParameterSamples()
    before = samples.read(own).value()
    own[0].data = own[0].data + 1
    moved = samples.read(own).value()
    own[0].data = own[0].data - 1
    assert moved != before
    fresh = ParameterSamples()
    assert samples.read(own).value() == fresh.read(own).value()


def test_parameters_without_memory_are_not_read() -> None:
    """FSDP takes the memory of a flat parameter away, of which others are views."""
    flat = torch.randn(4096)
    own, samples = [torch.nn.Parameter(flat[:2048]), torch.nn.Parameter(flat[2048:]), *parameters()], ParameterSamples()
    before = samples.read(own).value()
    flat.untyped_storage().resize_(0)
    assert samples.read(own).value() == ParameterSamples().read(parameters()).value() != before


def test_views_are_read_where_their_numbers_are() -> None:
    """Also of a matrix that is stored by columns, and of numbers that are no whole words."""
    generator = torch.Generator().manual_seed(5)
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.randn(64, 64, generator=generator).to(dtype)
        own, samples = [whole.t()[3:9], whole[::2, 1:4], whole[0, :3]], ParameterSamples()
        before = samples.read(own).value()
        assert ParameterSamples().read(own).value() == before
        whole += 1
        assert samples.read(own).value() != before


def test_learning_rates_are_compared_by_their_bits() -> None:
    assert learning_rate_bits([{"lr": 0.1}, {"lr": 0.1}]) == float_bits(0.1)
    assert learning_rate_bits([{"lr": 0.1}, {"lr": 0.2}]) != learning_rate_bits([{"lr": 0.2}, {"lr": 0.1}])
    # On a device, reading it would wait.
    assert learning_rate_bits([{"lr": torch.tensor(0.1)}]) is None and learning_rate_bits([]) is None
