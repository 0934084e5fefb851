"""State that FSDP2 has sharded over the ranks of a machine: each rank copies, and restores, the part that it holds.

FSDP2 cuts tensors along their first dimension, so a rank's part is a range of the whole tensor's bytes in its file. The
files are therefore the same as without sharding, and any number of ranks can resume from them, sharded or not.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.errors import CheckpointError
from checkpointing.rank.file_images import FileImage, bytes_of


@dataclass(frozen=True)
class Part:
    """The part of a tensor that this rank holds.

    Attributes:
        rows: Its range along the first dimension.
        offset: Its offset in bytes of the whole tensor.
        tensor: The part itself, on the rank's device.
        guards: Tensors whose version counters together show any change in place.
    """

    rows: slice
    offset: int
    tensor: torch.Tensor
    guards: tuple[torch.Tensor, ...]


# By the storage of the stand-in for the whole tensor.
Parts = dict[int, Part]


def is_sharded(value: object) -> bool:
    """Return whether a value is a `DTensor`, without importing the slow module, which is loaded if there is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def has_sharded(model: torch.nn.Module) -> bool:
    """Return whether any parameter is sharded."""
    return any(is_sharded(parameter) for parameter in model.parameters())


def part_of(tensor: Any) -> Part:
    """Return this rank's part of a `DTensor`.

    Raises:
        CheckpointError: The tensor is not cut along its first dimension.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(not (placement.is_replicate() or placement.is_shard(0)) for placement in tensor.placements):
        raise CheckpointError(
            f"a tensor is distributed as {tensor.placements}: only sharding along the first dimension (FSDP2) is "
            "supported"
        )
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    # Not `to_local`: the tensor that it returns has a version counter of its own.
    local = tensor._local_tensor.detach()
    first = start[0] if local.numel() else 0
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    return Part(slice(first, first + shape[0]), first * row_bytes, local, (tensor, tensor._local_tensor))


def stand_ins(obj: Any, parts: Parts) -> Any:
    """Return the same dicts, lists and tuples with a stand-in for every sharded tensor.

    A stand-in has the size of the whole tensor, but no contents, and no memory is touched for it. Shared tensors stay
    shared.

    Args:
        obj: Nested dicts, lists and tuples.
        parts: Receives this rank's part for every stand-in.
    """
    return _stand_ins(obj, parts, {})


def _stand_ins(obj: Any, parts: Parts, made: dict[int, torch.Tensor]) -> Any:
    if isinstance(obj, torch.Tensor):
        if not is_sharded(obj):
            return obj
        if id(obj) not in made:
            # Not `torch.empty`, which fills memory under deterministic algorithms.
            memory = torch.UntypedStorage(obj.numel() * obj.element_size())
            whole = made[id(obj)] = _whole(memory, obj)
            parts[whole.untyped_storage()._cdata] = part_of(obj)
        return made[id(obj)]
    if isinstance(obj, Mapping):
        return {key: _stand_ins(value, parts, made) for key, value in obj.items()}
    if isinstance(obj, list):
        return [_stand_ins(value, parts, made) for value in obj]
    if type(obj) is tuple:
        return tuple(_stand_ins(value, parts, made) for value in obj)
    return obj


def _whole(memory: torch.UntypedStorage, like: Any) -> torch.Tensor:
    flat = torch.empty(0, dtype=like.dtype).set_(memory)
    return flat.view(like.shape)


def is_stand_in(tensor: torch.Tensor, parts: Parts) -> bool:
    """Return whether a tensor only stands in for a sharded one."""
    return tensor.untyped_storage()._cdata in parts


def take_over(image: FileImage, parts: Parts) -> FileImage:
    """Return the image with this rank's parts in place of the stand-ins."""
    kept = []
    for offset, tensor in image.tensors:
        part = parts.get(tensor.untyped_storage()._cdata)
        if part is None:
            kept.append((offset, tensor))
        else:
            image.own.append((offset + part.offset, bytes_of(part.tensor.contiguous().reshape(-1))))
    return dataclasses.replace(image, tensors=kept)


def cut_like(whole: torch.Tensor, live: Any) -> torch.Tensor:
    """Return this rank's part of a whole tensor, distributed like `live`; all of it where `live` is not sharded.

    The part is a copy, so that the whole tensor can be freed.
    """
    if not is_sharded(live) or whole.shape != live.shape:
        return whole
    from torch.distributed.tensor import DTensor

    own = whole[part_of(live).rows].to(live.device, copy=True)
    cut: torch.Tensor = DTensor.from_local(
        own, live.device_mesh, live.placements, run_check=False, shape=live.shape, stride=live.stride()
    )
    return cut


def cut_optimizer_state(state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's state dict, cut to this rank's parts where the optimizer's parameters are sharded."""
    # A user's own optimizer need not have groups.
    groups = getattr(optimizer, "param_groups", ())
    parameters = [parameter for group in groups for parameter in group["params"]]
    if not any(map(is_sharded, parameters)):
        return state
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    cut = dict(state["state"])
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in cut:
            cut[number] = {
                name: cut_like(value, parameter) if isinstance(value, torch.Tensor) else value
                for name, value in cut[number].items()
            }
    return {**state, "state": cut}


def check_placement(model: torch.nn.Module, local_world_size: int) -> None:
    """Check that the ranks of one machine together hold all of the model.

    Raises:
        CheckpointError: The model is sharded over several machines.
    """
    groups, parameters = set(), list[Any](model.parameters())
    for parameter in parameters:
        if is_sharded(parameter):
            mesh = parameter.device_mesh
            groups |= {mesh.get_group(dim) for dim, place in enumerate(parameter.placements) if place.is_shard()}
    for group in groups:
        machines = {rank // local_world_size for rank in dist.get_process_group_ranks(group)}
        if len(machines) > 1:
            raise CheckpointError(
                f"the model is sharded over {len(machines)} machines, but each must hold all of it, so that the loss "
                "of one loses nothing: shard within a machine and replicate between them (HSDP: dp_shard_size="
                f"{local_world_size}, dp_replicate_size={len(machines)})"
            )
