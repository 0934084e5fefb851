"""How many buffers the sums of a block take."""

from __future__ import annotations

import pytest
import torch

from checkpointing.errors import CheckpointError
from checkpointing.exact.partial_sums import PartialSums
from checkpointing.exact.tree import TreeNode


def test_there_are_as_many_as_the_leaves_have_binary_digits() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    sums = PartialSums([parameter], 16)
    counts: list[int] = []
    for leaf in range(16):
        parameter.grad = torch.full((3,), float(leaf))
        sums.push(leaf)
        assert parameter.grad is None
        counts.append(len(sums.nodes))
    assert max(counts) == 4 and counts[-1] == 1 and sums.nodes == [TreeNode(0, 16)]


def test_memory_that_is_used_again_is_copied() -> None:
    parameter, memory = torch.nn.Parameter(torch.zeros(3)), torch.ones(3)
    sums = PartialSums([parameter], 4, shared=True)
    parameter.grad = memory
    sums.push(0)
    memory.fill_(9)
    nodes, values = sums.with_last(1, [parameter], [torch.full((3,), 2.0)])
    assert nodes == [TreeNode(0, 2)] and values[0][0].tolist() == [3.0, 3.0, 3.0]
    sums.clear()
    assert sums.nodes == []


def test_a_missing_gradient_counts_as_zeros() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    sums = PartialSums([parameter], 4)
    sums.push(0)
    _, values = sums.with_last(1, [parameter], [torch.tensor([-0.0, 1.0])])
    # Of two zeros, the sum is the positive one, wherever it is computed.
    assert str(values[0][0].tolist()) == "[0.0, 1.0]"


def test_leaves_with_gradients_of_different_parameters_are_refused() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    sums = PartialSums([first, second], 4)
    first.grad = torch.ones(2)
    sums.push(0)
    second.grad = torch.ones(2)
    with pytest.raises(CheckpointError, match="layers that a micro-batch skips"):
        sums.push(1)
