"""What samples show: which tensors a copy, or training, has changed since they were handed over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from checkpointing.files.file_images import Extent, bytes_of
from checkpointing.state.samples import Sampler, Samples, listed, named_tensors

SIZES = {"small": 5, "odd": 3, "large": 1 << 16, "scalar": 1}


def state() -> dict[str, torch.Tensor]:
    return {name: torch.arange(size, dtype=torch.float32) for name, size in SIZES.items()}


def copied(tensors: dict[str, torch.Tensor]) -> tuple[list[Extent], bytearray]:
    """A copy with gaps, of odd lengths, in an arena."""
    extents, memory = [], bytearray()
    for tensor in tensors.values():
        memory += b"\xaa" * 13
        source = bytes_of(tensor.reshape(-1))
        extents.append(Extent(len(memory), source))
        memory += source.numpy().tobytes()
    return extents, memory


def handed_over(tensors: dict[str, torch.Tensor], sampler: Sampler | None = None) -> Samples:
    return (sampler or Sampler(3)).hand_over(list(named_tensors(tensors, "model")))


def torn(samples: Samples, extents: list[Extent], memory: bytearray) -> list[str]:
    samples.read_again()
    return samples.torn(extents, memoryview(memory))


def test_a_whole_copy_is_whole() -> None:
    tensors = state()
    samples = handed_over(tensors)
    assert torn(samples, *copied(tensors)) == [] == samples.look().changed()


@pytest.mark.parametrize("name", SIZES)
def test_a_copy_of_another_moment_is_named(name: str) -> None:
    tensors = state()
    samples = handed_over(tensors)
    before = tensors[name].clone()
    tensors[name].data += 1
    extents, memory = copied(tensors)
    tensors[name].data.copy_(before)
    # It is as it was, at the end of the copy and when the optimizer steps; only the copy is not.
    assert samples.look().changed() == []
    assert torn(samples, extents, memory) == [f"model[{name!r}]"]


def test_a_write_that_stays_is_named_before_the_optimizer_steps() -> None:
    tensors = state()
    samples = handed_over(tensors)
    whole = copied(tensors)
    tensors["large"].data.clamp_(0, 7)
    assert samples.look().changed() == ["model['large']"]
    assert torn(samples, *whole) == ["model['large']"]


def test_any_piece_longer_than_the_distance_is_found() -> None:
    for seed in range(50):
        tensors = state()
        samples = handed_over(tensors, Sampler(seed))
        begin = int(torch.randint(0, (1 << 16) - 1100, (1,)))
        # 65,536 floats are 32,768 words; 257 of them between two samples.
        tensors["large"].data[begin : begin + 2 * 257 + 2] = -1
        assert samples.look().changed() == ["model['large']"], begin


def test_other_memory_with_other_values_is_a_write() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3000))
    samples = Sampler(1).hand_over([("p", parameter)])
    parameter.data = torch.zeros(3000)
    assert samples.look().changed() == []
    parameter.data = torch.ones(3000)
    assert samples.look().changed() == ["p"]


def test_what_another_rank_copies_is_not_judged() -> None:
    tensors = state()
    samples = handed_over(tensors)
    extents, memory = copied(tensors)
    first = extents[2]
    half = first.source.numel() // 2 + 1
    memory[first.offset + half :] = b"\0" * (len(memory) - first.offset - half)
    assert torn(samples, [Extent(first.offset, first.source[:half])], memory) == []
    assert torn(samples, [first], memory) == ["model['large']"]


def test_runs_at_equal_distances_are_found_where_they_are() -> None:
    tensor = torch.arange(60, dtype=torch.float32).reshape(5, 12)
    samples = Sampler(2).hand_over([("part", tensor)])
    source = bytes_of(tensor.view(-1)).view(5, 48)
    memory = bytearray(2000)
    target = np.ndarray((5, 48), np.uint8, memory, 100, (200, 1))
    target[...] = source.numpy()
    extent = Extent(100, source, (200,))
    assert torn(samples, [extent], memory) == []
    target[3, 20] ^= 1
    assert torn(samples, [extent], memory) == ["part"]


def test_places_are_drawn_again_and_tensors_may_change() -> None:
    sampler, tensors = Sampler(4), state()
    first = handed_over(tensors, sampler)
    sampler.prepare_next()
    second = handed_over(tensors, sampler)
    pairs = zip(first._groups, second._groups, strict=True)
    assert any(not np.array_equal(one.addresses(), other.addresses()) for one, other in pairs)
    sampler.prepare_next()
    tensors["large"] = torch.zeros(9)
    assert torn(handed_over(tensors, sampler), *copied(tensors)) == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0),
        torch.zeros((), device="meta"),
        torch.zeros(4, 3).t(),
        torch.zeros(1).expand(5),
        torch.zeros(9, dtype=torch.bool)[1:],
        torch.eye(3).to_sparse(),
    ],
    ids=["empty", "meta", "transposed", "expanded", "unaligned", "sparse"],
)
def test_any_tensor_may_be_given(tensor: torch.Tensor) -> None:
    samples = Sampler().hand_over([("t", tensor)])
    assert samples.look().changed() == []
    samples.read_again()
    assert samples.torn([], memoryview(bytearray(8))) == []


def test_memory_that_is_gone_is_passed_over() -> None:
    tensor = torch.ones(100)
    view: Any = tensor.detach()
    tensor.untyped_storage().resize_(0)
    assert Sampler().hand_over([("t", view)]).look().changed() == []


def test_memory_that_goes_away_is_a_write() -> None:
    tensor = torch.ones(100)
    samples = Sampler().hand_over([("t", tensor.detach())])
    tensor.untyped_storage().resize_(0)
    assert samples.look().changed() == ["t"]
    samples.read_again()
    assert samples.torn([], memoryview(bytearray(8))) == ["t"]


def test_names_are_listed_briefly() -> None:
    assert listed(["a"]) == "1 tensor (a)"
    assert listed(["a", "b", "c", "d"]) == "4 tensors (a, b, c, …)"
