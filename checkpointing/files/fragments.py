"""Fragments: what a rank holds of a flattened tensor, as DeepSpeed's ZeRO deals tensors out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Fragment:
    """Some consecutive elements of a tensor in C order.

    Attributes:
        shape: Shape of the whole tensor.
        first: Number of elements before it.
        tensor: The elements themselves, in one dimension; changes in it are changes of the state.
        is_written: Whether this rank copies them, of all on this node that hold the same.
        distribution: What fragments have in common of which ranks may hold the same.
    """

    shape: tuple[int, ...]
    first: int
    tensor: torch.Tensor
    is_written: bool = True
    distribution: str = "fragments"

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        """Where the elements are."""
        return self.tensor.device

    @property
    def last(self) -> int:
        """Number of elements before its end."""
        return self.first + self.tensor.numel()

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor."""
        return math.prod(self.shape) * self.tensor.element_size()


def is_partitioned(value: object) -> bool:
    """Return whether a value is a parameter that ZeRO-3 has partitioned, and which is empty between its uses."""
    return hasattr(value, "ds_tensor")


def fragment_of(value: Any) -> Fragment | None:
    """Return a `Fragment` as it is, and what this rank holds of a parameter of ZeRO-3; None for any other value."""
    if isinstance(value, Fragment):
        return value
    if not is_partitioned(value):
        return None
    # Each rank has equally much; what exceeds the parameter is padding.
    own = value.ds_tensor.detach().view(-1)
    first = min(dist.get_rank(value.ds_process_group) * own.numel(), value.ds_numel)
    return Fragment(tuple(value.ds_shape), first, own[: max(min(own.numel(), value.ds_numel - first), 0)])


def assembled(parameter: Any) -> torch.Tensor:
    """Return a copy of a whole parameter of ZeRO-3, which all ranks ask for together."""
    own = parameter.ds_tensor.detach().view(-1)
    if own.device.type == "cpu" and dist.get_backend(parameter.ds_process_group) != "gloo":
        # Parameters that are kept in host memory.
        own = own.to(torch.accelerator.current_accelerator())
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(parameter.ds_process_group))]
    dist.all_gather(parts, own.contiguous(), group=parameter.ds_process_group)
    found: torch.Tensor = torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape)
    return found
