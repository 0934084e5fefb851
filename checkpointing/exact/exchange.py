"""The sum over all ranks, in the fixed tree: with the volume of a ring all-reduce where each rank has one node left.

Each rank receives its chunk of everybody's nodes, adds them in the order of the tree, takes the mean once, at the root,
and sends the result to all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from checkpointing.exact.tree import block_of, nodes_of, total


class Exchange:
    """Exchanges gradients of the ranks' blocks; one thread of each rank uses it, in the same order.

    Args:
        world_size: Number of ranks.
        virtual_ranks: Number of virtual ranks.
        group: The ranks' process group; None for a single process, or the default one.
    """

    def __init__(self, world_size: int, virtual_ranks: int, group: dist.ProcessGroup | None = None) -> None:
        self._world_size, self._virtual_ranks, self._group = world_size, virtual_ranks, group
        self._nodes = [nodes_of(block_of(one, world_size, virtual_ranks), virtual_ranks) for one in range(world_size)]
        self._received = torch.empty(0, dtype=torch.uint8)

    def mean(self, target: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        """Write the mean over all virtual ranks.

        Args:
            target: Where to, of shape (N,); one of `values` at most.
            values: This rank's nodes, from its first leaf on, of shape (N,) each.
        """
        if self._world_size == 1:
            nodes = dict(zip(self._nodes[0], values, strict=True))
            target.copy_(total(nodes, self._virtual_ranks, torch.add))
            target.div_(self._virtual_ranks)
            return
        world_size, numel = self._world_size, target.numel()
        chunk = -(-numel // world_size)
        exact = chunk * world_size == numel
        if exact and len(values) == 1:
            outgoing = values[0]
        else:
            # By receiver, and then by node.
            outgoing = target.new_zeros((world_size, len(values), chunk))
            for number, value in enumerate(values):
                whole = numel // chunk
                outgoing[:whole, number] = value[: whole * chunk].view(whole, chunk)
                if not exact and whole < world_size:
                    outgoing[whole, number, : numel - whole * chunk] = value[whole * chunk :]
        counts = [len(nodes) for nodes in self._nodes]
        incoming = self._memory(sum(counts) * chunk, target)
        size = chunk * target.element_size()
        # As bytes: the type is of no concern.
        dist.all_to_all_single(
            incoming.view(torch.uint8),
            outgoing.reshape(-1).view(torch.uint8),
            [count * size for count in counts],
            [len(values) * size] * world_size,
            group=self._group,
        )
        rows = incoming.view(-1, chunk)
        nodes = dict(zip((node for one in self._nodes for node in one), rows, strict=True))
        mine = total(nodes, self._virtual_ranks, torch.Tensor.add_).div_(self._virtual_ranks)
        result = target if exact else target.new_empty(chunk * world_size)
        dist.all_gather_into_tensor(result.view(torch.uint8), mine.view(torch.uint8), group=self._group)
        if not exact:
            target.copy_(result[:numel])

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that it keeps."""
        return self._received.numel()

    def _memory(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return memory of the largest bucket so far, which all buckets use one after the other."""
        nbytes = numel * like.element_size()
        if self._received.numel() < nbytes or self._received.device != like.device:
            self._received = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        return self._received[:nbytes].view(like.dtype)
