"""The sum over ranks, with collectives between threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from thread_ranks import ThreadRanks, run_ranks

from checkpointing.exact import exchange
from checkpointing.exact.exchange import Exchange
from checkpointing.exact.tree import Node, block_of, nodes_of, total
from checkpointing.rank.ranks import Ranks


class Collectives:
    """In place of torch.distributed; the group is the rank's own."""

    @staticmethod
    def all_to_all_single(output: Any, data: Any, outputs: list[int], inputs: list[int], group: ThreadRanks) -> None:
        parts = [part.clone() for part in data.split(inputs)]
        everyone = group.gather(parts)
        output.copy_(torch.cat([theirs[group.rank] for theirs in everyone]))
        assert [len(theirs[group.rank]) for theirs in everyone] == outputs

    @staticmethod
    def all_gather_into_tensor(output: Any, data: Any, group: ThreadRanks) -> None:
        output.copy_(torch.cat(group.gather(data.clone())))


@pytest.mark.parametrize("numel", [1, 7, 12, 24])
@pytest.mark.parametrize(("world_size", "virtual_ranks"), [(1, 5), (2, 2), (2, 8), (3, 8), (3, 3), (4, 6), (5, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_has_the_bits_of_the_tree(
    world_size: int, virtual_ranks: int, numel: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "dist", Collectives)
    generator = torch.Generator().manual_seed(numel)
    leaves = {Node(leaf): torch.randn(numel, generator=generator).to(dtype) for leaf in range(virtual_ranks)}
    expected = total(leaves, virtual_ranks, torch.add) / virtual_ranks

    def mean(ranks: Ranks) -> list[torch.Tensor]:
        block = block_of(ranks.rank, world_size, virtual_ranks)
        values = []
        for node in nodes_of(block, virtual_ranks):
            inside = {
                leaf: value for leaf, value in leaves.items() if node.first <= leaf.first < node.first + node.width
            }
            own = {Node(leaf.first - node.first): value for leaf, value in inside.items()}
            values.append(total(own, len(own), torch.add).clone())
        ours: Any = ranks
        one, found = Exchange(world_size, virtual_ranks, ours), []
        for _ in range(2):
            target = values[-1].clone()
            one.mean(target, [*values[:-1], target])
            found.append(target)
        return found

    for found in run_ranks(mean, world_size):
        assert isinstance(found, list), found
        assert all(torch.equal(one, expected) for one in found)
