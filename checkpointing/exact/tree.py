"""The tree in which the gradients of virtual ranks are summed, whichever ranks compute them. No torch here.

The leaves are the virtual ranks 0 … V-1. A node of width 2^k covers the leaves from a multiple of 2^k on; at the end,
where there are fewer leaves, a node without a right child has the value of its left one. Floating-point addition is
commutative but not associative, so the sum has the same bits wherever its parts are added, as long as the same pairs
are added.

Each rank has a block of consecutive virtual ranks. It adds what is within its block, and has a few nodes left, whose
parents have leaves of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class TreeNode:
    """A node of the tree.

    Attributes:
        first: Its first leaf.
        width: Leaves that it has room for, a power of two.
    """

    first: int
    width: int = 1


def depth_width(virtual_ranks: int) -> int:
    """Return the width of the root."""
    return 1 << (virtual_ranks - 1).bit_length()


def pushed(stack: Sequence[TreeNode], leaf: int, virtual_ranks: int) -> tuple[list[TreeNode], int]:
    """Add the next leaf to what a block has so far: a binary counter.

    Args:
        stack: The nodes that the block has, from its first leaf on.
        leaf: The leaf behind them.
        virtual_ranks: Number of all leaves.

    Returns:
        The nodes then; and how many of the last ones of `stack` were added to the leaf, one after the other.
    """
    nodes, node, merged = list(stack), TreeNode(leaf), 0
    while node.width < depth_width(virtual_ranks):
        if node.first % (2 * node.width):
            left = TreeNode(node.first - node.width, node.width)
            if not nodes or nodes[-1] != left:
                break
            nodes.pop()
            merged += 1
            node = TreeNode(left.first, 2 * node.width)
        elif node.first + node.width >= virtual_ranks:
            # There is no right child.
            node = TreeNode(node.first, 2 * node.width)
        else:
            break
    return [*nodes, node], merged


def nodes_of(block: range, virtual_ranks: int) -> list[TreeNode]:
    """Return the nodes that are left when all of a block has been added: at most 2 log2(V)."""
    stack: list[TreeNode] = []
    for leaf in block:
        stack, _ = pushed(stack, leaf, virtual_ranks)
    return stack


def total(values: Mapping[TreeNode, T], virtual_ranks: int, add: Callable[[T, T], T]) -> T:
    """Return the value of the root.

    Args:
        values: Nodes that together cover all leaves once.
        virtual_ranks: Number of all leaves.
        add: Adds the values of two children.
    """

    def value(node: TreeNode) -> T:
        if node in values:
            return values[node]
        half = node.width // 2
        left = value(TreeNode(node.first, half))
        middle = node.first + half
        return add(left, value(TreeNode(middle, half))) if middle < virtual_ranks else left

    return value(TreeNode(0, depth_width(virtual_ranks)))
