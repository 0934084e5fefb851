"""The sum of virtual ranks' gradients has the same bits for every division into blocks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.data.dealing import block_of
from checkpointing.exact.tree import TreeNode, nodes_of, pushed, total


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
