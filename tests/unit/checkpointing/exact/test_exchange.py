"""The sum over ranks, with messages between threads."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from helpers.thread_ranks import ThreadRanks, run_ranks

from checkpointing.data.dealing import block_of
from checkpointing.exact import exchange
from checkpointing.exact.exchange import Exchange
from checkpointing.exact.tree import TreeNode, nodes_of, total
from checkpointing.process.ranks import Ranks


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
    monkeypatch.setattr(exchange, "dist", Messages)
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
