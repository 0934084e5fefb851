"""Sums by which ranks compare their replicas."""

from __future__ import annotations

import torch

from checkpointing.state.tensor_fingerprint import fingerprint


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_any_changed_value_changes_its_tensors_sum_only() -> None:
    tensors = [torch.randn(5), torch.randn(16), torch.arange(3, dtype=torch.uint8)]
    before = fingerprint(map(flat, tensors))
    assert before.dtype == torch.int64 and before.shape == (3,)
    for number, tensor in enumerate(tensors):
        for place in range(tensor.numel()):
            changed = [one.clone() for one in tensors]
            changed[number][place] += 1
            differing = (fingerprint(map(flat, changed)) != before).nonzero().flatten().tolist()
            assert differing == [number]


def test_memory_that_is_not_aligned_is_summed_too() -> None:
    memory = torch.zeros(65, dtype=torch.uint8)
    memory[1:] = torch.arange(64, dtype=torch.uint8)
    sums = [int(fingerprint([memory[1:].clone()])), int(fingerprint([memory[1:]]))]
    # Another sum for the same bytes: layouts, and so alignment, are equal on all ranks.
    assert sums[1] == sum(range(64)) and sums[0] != 0


def test_nothing_has_no_sums() -> None:
    assert fingerprint([]).tolist() == []
