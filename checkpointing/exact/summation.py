"""The sum of all virtual ranks' gradients: one fixed tree, added up within each rank and then between ranks.

The leaves are the virtual ranks 0 … V-1. A node of width 2^k covers the leaves from a multiple of 2^k on; at the end,
where there are fewer leaves, a node without a right child has the value of its left one. Floating-point addition is
commutative but not associative, so the sum has the same bits wherever its parts are added, as long as the same pairs
are added.

Each rank has a block of consecutive virtual ranks. It adds what is within its block (`PartialSums`), and has a few
nodes left, whose parents have leaves of other ranks (`Exchange`): with one node, at the volume of a ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from checkpointing.data.dealing import block_of
from checkpointing.errors import CheckpointError
from checkpointing.process.ranks import backend_of

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class TreeNode:
    """A node of the tree: its first leaf, and for how many it has room, a power of two."""

    first: int
    width: int = 1


def depth_width(virtual_ranks: int) -> int:
    """Return the width of the root."""
    return 1 << (virtual_ranks - 1).bit_length()


def pushed(stack: Sequence[TreeNode], leaf: int, virtual_ranks: int) -> tuple[list[TreeNode], int]:
    """Add the leaf behind what a block has so far: a binary counter.

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
    """Return the value of the root, from those of nodes that together cover all leaves once."""

    def value(node: TreeNode) -> T:
        if node in values:
            return values[node]
        half = node.width // 2
        left = value(TreeNode(node.first, half))
        middle = node.first + half
        return add(left, value(TreeNode(middle, half))) if middle < virtual_ranks else left

    return value(TreeNode(0, depth_width(virtual_ranks)))


class PartialSums:
    """The sums of a block's first leaves: a binary counter of at most log2(V) + 1 sets of gradients.

    Where gradients are `shared`, they are views of memory that is used again, and are copied. The sums may be kept in
    the host's memory; the bits are the same, since adding is the same there.

    Attributes:
        nodes: The nodes that there are.
        most: Most of them at a time.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        virtual_ranks: int,
        *,
        shared: bool = False,
        on_host: bool = False,
    ) -> None:
        self._parameters, self._virtual_ranks = list(parameters), virtual_ranks
        self._shared, self._on_host = shared, on_host
        self._places = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self.nodes: list[TreeNode] = []
        self.most = 0
        self._sums: list[list[torch.Tensor]] = []
        self._used: list[bool] = []

    def clear(self) -> None:
        """Forget the last step."""
        self.nodes, self._sums = [], []

    def push(self, leaf: int) -> None:
        """Take the parameters' gradients, which are None afterwards, as those of a leaf; see `check_used`."""
        self.check_used()
        gradients = [self._taken(parameter) for parameter in self._parameters]
        self.nodes, merged = pushed(self.nodes, leaf, self._virtual_ranks)
        for _ in range(merged):
            left = self._sums.pop()
            torch._foreach_add_(left, gradients)
            gradients = left
        self._sums.append(gradients)
        self.most = max(self.most, len(self._sums))

    def check_used(self) -> None:
        """Check that the same parameters have gradients now as for the first leaf of the block, and none are sparse."""
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise CheckpointError(
                    "some gradients are sparse (Embedding(sparse=True)), which virtual ranks cannot add: use dense ones"
                )
        used = [parameter.grad is not None for parameter in self._parameters]
        self._used = self._used if self.nodes else used
        if used != self._used:
            raise CheckpointError(
                "some parameters have gradients of some virtual ranks only (layers that a micro-batch skips): whether "
                "they count would depend on the number of ranks, so virtual ranks cannot be exact (elastic.mode)"
            )

    def with_last(
        self, leaf: int, parameters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor]
    ) -> list[list[torch.Tensor]]:
        """Add the last leaf of a block, for some of the parameters; call it once for each.

        The leaf's gradients become those of the last node. For each node of the block, from its first leaf on, the
        gradients of these parameters are returned.
        """
        _, merged = pushed(self.nodes, leaf, self._virtual_ranks)
        places = [self._places[id(parameter)] for parameter in parameters]
        own = list(gradients)
        for sums in reversed(self._sums[len(self._sums) - merged :]):
            torch._foreach_add_(own, [sums[place].to(own[0].device) for place in places])
        rest = self._sums[: len(self._sums) - merged]
        return [*([sums[place].to(own[0].device) for place in places] for sums in rest), own]

    def _taken(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is None:
            # -0.0 + 0.0 is another zero than -0.0: it must be added on every layout, or on none.
            gradient = torch.zeros_like(parameter)
        if self._on_host:
            return gradient.detach().to("cpu", copy=self._shared)
        return gradient.detach().clone() if self._shared else gradient.detach()


Part = tuple[torch.Tensor, int]
# Tells these messages from those of scripts, most of which have none or a small one.
_TAG = 0x7EE5


class Exchange:
    """Exchanges gradients of the ranks' blocks; one thread of each rank uses it, in the same order.

    Each rank receives its chunk of everybody's nodes, adds them in the order of the tree, takes the mean once, at the
    root, and sends the result to all. Chunks are sent to single ranks, from and to where they belong: gloo's
    `all_gather` and `all_to_all` copy all of them once or twice more.
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
