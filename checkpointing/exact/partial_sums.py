"""Gradients of the virtual ranks of one rank, added as they come: a binary counter of buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from checkpointing.errors import CheckpointError
from checkpointing.exact.tree import TreeNode, pushed


class PartialSums:
    """The sums of a block's first leaves; at most log2(V) + 1 sets of gradients.

    Args:
        parameters: What has gradients.
        virtual_ranks: Number of all virtual ranks.
        shared: Whether gradients are views of memory that is used again, and must be copied.
        on_host: Keep the sums in the host's memory; the bits are the same, since adding is the same there.

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
        """Take the parameters' gradients, which are None afterwards, as those of a leaf.

        Raises:
            CheckpointError: Another leaf of the block has gradients of other parameters.
        """
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
        """Check that the same parameters have gradients now as for the first leaf of the block.

        Raises:
            CheckpointError: Others do; or some are sparse.
        """
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
    ) -> tuple[list[TreeNode], list[list[torch.Tensor]]]:
        """Add the last leaf of a block, for some of the parameters; call it once for each.

        Args:
            leaf: The leaf.
            parameters: Some of the parameters.
            gradients: The leaf's gradients for these, which become the last node's.

        Returns:
            The nodes of the block, and for each the gradients of these parameters.
        """
        nodes, merged = pushed(self.nodes, leaf, self._virtual_ranks)
        places = [self._places[id(parameter)] for parameter in parameters]
        own = list(gradients)
        for sums in reversed(self._sums[len(self._sums) - merged :]):
            torch._foreach_add_(own, [sums[place].to(own[0].device) for place in places])
        rest = self._sums[: len(self._sums) - merged]
        return nodes, [*([sums[place].to(own[0].device) for place in places] for sums in rest), own]

    def _taken(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is None:
            # -0.0 + 0.0 is another zero than -0.0: it must be added on every layout, or on none.
            gradient = torch.zeros_like(parameter)
        if self._on_host:
            return gradient.detach().to("cpu", copy=self._shared)
        return gradient.detach().clone() if self._shared else gradient.detach()
