"""The sum of virtual ranks' gradients has the same bits for every division into blocks."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from helpers.thread_ranks import ThreadRanks, run_ranks
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.data.dealing import block_of
from checkpointing.errors import CheckpointError
from checkpointing.exact import summation
from checkpointing.exact.summation import Exchange, PartialSums, TreeNode, nodes_of, pushed, total
from checkpointing.process.ranks import Ranks


def by_blocks(leaves: list[float], world_size: int) -> float:
    """Sum as the ranks do it: each its block, with a binary counter, and then all together."""
    left: dict[TreeNode, float] = {}
    for rank in range(world_size):
        stack: list[TreeNode] = []
        values: list[float] = []
        for leaf in block_of(rank, world_size, len(leaves)):
            stack, merged = pushed(stack, leaf, len(leaves))
            value = leaves[leaf]
            for _ in range(merged):
                value = values.pop() + value
            values.append(value)
        assert stack == nodes_of(block_of(rank, world_size, len(leaves)), len(leaves))
        left |= dict(zip(stack, values, strict=True))
    return total(left, len(leaves), lambda one, other: one + other)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_the_sum_does_not_depend_on_the_number_of_ranks(leaves: list[float]) -> None:
    assert len({by_blocks(leaves, world_size).hex() for world_size in range(1, len(leaves) + 1)}) == 1


def test_another_order_would_differ() -> None:
    dice = random.Random(1)
    leaves = [dice.uniform(-1, 1) * 10 ** dice.randint(-6, 6) for _ in range(11)]
    assert by_blocks(leaves, 3) != sum(leaves)


@pytest.mark.parametrize("virtual_ranks", range(1, 20))
def test_blocks_are_consecutive_and_even(virtual_ranks: int) -> None:
    for world_size in range(1, virtual_ranks + 1):
        blocks = [block_of(rank, world_size, virtual_ranks) for rank in range(world_size)]
        assert [leaf for block in blocks for leaf in block] == list(range(virtual_ranks))
        sizes = [len(block) for block in blocks]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
        # What a rank keeps while it adds, and what it sends.
        most = virtual_ranks.bit_length()
        assert all(len(nodes_of(block, virtual_ranks)) <= 2 * most for block in blocks)


@pytest.mark.parametrize(
    ("block", "virtual_ranks", "expected"),
    [
        (range(8), 8, [TreeNode(0, 8)]),
        (range(4), 8, [TreeNode(0, 4)]),
        (range(3), 8, [TreeNode(0, 2), TreeNode(2)]),
        (range(3, 6), 8, [TreeNode(3), TreeNode(4, 2)]),
        # The last nodes have fewer leaves than room.
        (range(6), 6, [TreeNode(0, 8)]),
        (range(4, 6), 6, [TreeNode(4, 4)]),
        (range(4, 5), 5, [TreeNode(4, 4)]),
        (range(1), 1, [TreeNode(0)]),
    ],
)
def test_what_is_left_of_a_block(block: range, virtual_ranks: int, expected: list[TreeNode]) -> None:
    assert nodes_of(block, virtual_ranks) == expected


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
    ((value,),) = sums.with_last(1, [parameter], [torch.full((3,), 2.0)])
    assert value.tolist() == [3.0, 3.0, 3.0]
    sums.clear()
    assert sums.nodes == []


def test_a_missing_gradient_counts_as_zeros() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    sums = PartialSums([parameter], 4)
    sums.push(0)
    ((value,),) = sums.with_last(1, [parameter], [torch.tensor([-0.0, 1.0])])
    # Of two zeros, the sum is the positive one, wherever it is computed.
    assert str(value.tolist()) == "[0.0, 1.0]"


def test_leaves_with_gradients_of_different_parameters_are_refused() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    sums = PartialSums([first, second], 4)
    first.grad = torch.ones(2)
    sums.push(0)
    second.grad = torch.ones(2)
    with pytest.raises(CheckpointError, match="layers that a micro-batch skips"):
        sums.push(1)


class Message(NamedTuple):
    op: str
    tensor: torch.Tensor
    peer: int
    group: ThreadRanks
    tag: int


class Done:
    def wait(self) -> None:
        pass


class Messages:
    """In place of torch.distributed; the group is the rank's own."""

    P2POp, isend, irecv = Message, "isend", "irecv"

    @staticmethod
    def batch_isend_irecv(ops: list[Message]) -> list[Done]:
        # What one rank sends another arrives in the order of sending.
        for op in ops:
            if op.op == "isend":
                op.group.send(op.tensor, op.peer, op.group.rank)
        for op in ops:
            if op.op == "irecv":
                op.group.receive(op.tensor, op.peer, op.peer)
        return [Done() for _ in ops]


@pytest.mark.parametrize("numel", [1, 7, 12, 24])
@pytest.mark.parametrize(("world_size", "virtual_ranks"), [(1, 5), (2, 2), (2, 8), (3, 8), (3, 3), (4, 6), (5, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_has_the_bits_of_the_tree(
    world_size: int, virtual_ranks: int, numel: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summation, "dist", Messages)
    generator = torch.Generator().manual_seed(numel)
    leaves = {TreeNode(leaf): torch.randn(numel, generator=generator).to(dtype) for leaf in range(virtual_ranks)}
    expected = total(leaves, virtual_ranks, torch.add) / virtual_ranks

    def mean(ranks: Ranks) -> list[torch.Tensor]:
        block = block_of(ranks.rank, world_size, virtual_ranks)
        values = []
        for node in nodes_of(block, virtual_ranks):
            inside = {
                leaf: value for leaf, value in leaves.items() if node.first <= leaf.first < node.first + node.width
            }
            own = {TreeNode(leaf.first - node.first): value for leaf, value in inside.items()}
            values.append(total(own, len(own), torch.add).clone())
        ours: Any = ranks
        one, found = Exchange(ranks.rank, world_size, virtual_ranks, ours), []
        for _ in range(2):
            *rest, target = [value.clone() for value in values]
            one.mean(target, [*rest, target])
            found.append(target)
        return found

    for found in run_ranks(mean, world_size):
        assert isinstance(found, list), found
        assert all(torch.equal(one, expected) for one in found)
