"""The sum over all ranks, in the fixed tree: with the volume of a ring all-reduce where each rank has one node left.

Each rank receives its chunk of everybody's nodes, adds them in the order of the tree, takes the mean once, at the root,
and sends the result to all. Chunks are sent to single ranks, from and to where they belong: gloo's `all_gather` and
`all_to_all` copy all of them once or twice more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from checkpointing.data.dealing import block_of
from checkpointing.exact.tree import nodes_of, total
from checkpointing.process.broadcast import backend_of

Part = tuple[torch.Tensor, int]
# Tells these messages from those of scripts, most of which have none or a small one.
_TAG = 0x7EE5


class Exchange:
    """Exchanges gradients of the ranks' blocks; one thread of each rank uses it, in the same order.

    Args:
        rank: Number of this rank among all, as its peers are named.
        world_size: Number of ranks.
        virtual_ranks: Number of virtual ranks.
        group: The ranks' process group; None for a single process, or the default one.
    """

    def __init__(self, rank: int, world_size: int, virtual_ranks: int, group: dist.ProcessGroup | None = None) -> None:
        self._rank, self._virtual_ranks, self._group = rank, virtual_ranks, group
        self._nodes = [nodes_of(block_of(one, world_size, virtual_ranks), virtual_ranks) for one in range(world_size)]
        self._received = torch.empty(0, dtype=torch.uint8)

    def mean(self, target: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        """Write the mean over all virtual ranks.

        Args:
            target: Where to, of shape (N,); it may be one of `values`.
            values: This rank's nodes, from its first leaf on, of shape (N,) each; they may be overwritten.
        """
        world_size = len(self._nodes)
        if world_size == 1:
            # Of any shape and layout.
            nodes = dict(zip(self._nodes[0], values, strict=True))
            target.copy_(total(nodes, self._virtual_ranks, torch.add)).div_(self._virtual_ranks)
            return
        size = -(-target.numel() // world_size)
        chunks = [slice(rank * size, (rank + 1) * size) for rank in range(world_size)]
        others = [rank for rank in range(world_size) if rank != self._rank]
        mean = target[chunks[self._rank]]
        senders = [(node, rank) for rank in others for node in self._nodes[rank]]
        rows = self._memory(len(senders), mean)
        outgoing = [(value[chunks[rank]], rank) for rank in others for value in values]
        self._transfer(outgoing, [(row, rank) for row, (_, rank) in zip(rows, senders, strict=True)])
        nodes = {node: row for row, (node, _) in zip(rows, senders, strict=True)}
        nodes |= zip(self._nodes[self._rank], [value[chunks[self._rank]] for value in values], strict=True)
        torch.div(total(nodes, self._virtual_ranks, torch.Tensor.add_), self._virtual_ranks, out=mean)
        self._transfer([(mean, rank) for rank in others], [(target[chunks[rank]], rank) for rank in others])

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that it keeps."""
        return self._received.numel()

    def _transfer(self, outgoing: Sequence[Part], incoming: Sequence[Part]) -> None:
        """Send tensors to single ranks, and receive them; those from one rank come in the order of sending."""
        outgoing, incoming = ([part for part in parts if part[0].numel()] for parts in (outgoing, incoming))
        if not outgoing and not incoming:
            return
        device = (outgoing or incoming)[0][0].device
        if device.type != "cpu" and backend_of(device, self._group) == "gloo":
            # Gloo sends to single ranks from the host's memory only.
            copies = [torch.empty_like(tensor, device="cpu") for tensor, _ in incoming]
            sent = [(tensor.cpu(), rank) for tensor, rank in outgoing]
            self._transfer(sent, [(copy, rank) for copy, (_, rank) in zip(copies, incoming, strict=True)])
            for copy, (tensor, _) in zip(copies, incoming, strict=True):
                tensor.copy_(copy)
            return
        works = [dist.P2POp(dist.irecv, tensor, rank, self._group, _TAG) for tensor, rank in incoming]
        works += [dist.P2POp(dist.isend, tensor, rank, self._group, _TAG) for tensor, rank in outgoing]
        for work in dist.batch_isend_irecv(works):
            work.wait()

    def _memory(self, rows: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return memory of the largest bucket so far, which all buckets use one after the other."""
        nbytes = rows * like.nbytes
        if self._received.numel() < nbytes or self._received.device != like.device:
            self._received = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        return self._received[:nbytes].view(like.dtype).view(rows, like.numel()).unbind()
