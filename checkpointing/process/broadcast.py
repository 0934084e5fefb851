"""Moves a state that all ranks of a node have in host memory to their accelerators.

Each rank copies a share, and the process group broadcasts it. Host memory that is not pinned crosses the bus through
the driver's own buffers, at a few GB/s and the cost of a processor; between accelerators the process group is many
times as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.process.trees import replaced, tensors_in

# Each rank copies smaller tensors itself: a collective would take longer.
_SMALL_BYTES = 1024 * 1024


def is_worthwhile(device: torch.device, world_size: int, local_world_size: int) -> bool:
    """Return whether all ranks are on one machine, and the process group moves tensors between their accelerators.

    Gloo would copy them back to the host first; with several machines, each rank copies what its machine has.
    """
    if device.type == "cpu" or world_size == 1 or world_size != local_world_size:
        return False
    return backend_of(device) not in ("gloo", "mpi")


def backend_of(device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """Return the name of the backend by which a process group moves tensors of a device; "gloo" if it names none."""
    config = str(dist.get_backend_config(group))
    backends = dict(part.split(":") for part in config.split(",") if ":" in part)
    return backends.get(device.type, "gloo")


def owners(sizes: Sequence[int], world_size: int) -> list[int]:
    """Return the rank that copies each tensor, so that all copy about as many bytes; equal on all ranks.

    Args:
        sizes: Sizes of the tensors, in bytes.
        world_size: Number of ranks.
    """
    copied = [0] * world_size
    found = []
    for size in sizes:
        owner = min(range(world_size), key=copied.__getitem__)
        copied[owner] += size
        found.append(owner)
    return found


def to_device(
    state: Any,
    device: torch.device,
    rank: int,
    world_size: int,
    broadcast: Callable[[torch.Tensor, int], object] = dist.broadcast,
) -> Any:
    """Return the same nested state with its large tensors on the device; called by all ranks with equal states.

    Args:
        state: Nested dicts, lists and tuples. Small tensors, and views of others, stay where they are.
        device: This rank's accelerator.
        rank: Number of this rank.
        world_size: Number of ranks.
        broadcast: Sends a tensor from a rank to all others.
    """
    large: dict[int, torch.Tensor] = {}
    for tensor in tensors_in(state):
        # Tensors that share their memory must share it afterwards, too.
        is_alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        if tensor.device.type == "cpu" and tensor.nbytes >= _SMALL_BYTES and is_alone:
            large.setdefault(id(tensor), tensor)
    moved: dict[int, torch.Tensor] = {}
    for (key, tensor), owner in zip(
        large.items(), owners([tensor.nbytes for tensor in large.values()], world_size), strict=True
    ):
        moved[key] = tensor.to(device) if owner == rank else torch.empty_like(tensor, device=device)
        # As bytes: not every back end supports every type.
        broadcast(moved[key].view(-1).view(torch.uint8), owner)
    return replaced(state, lambda value: moved.get(id(value), value))
