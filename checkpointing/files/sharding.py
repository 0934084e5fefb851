"""State that is sharded over ranks: each rank copies, and restores, the boxes that it holds.

A box is some runs of bytes of the whole tensor in its file (`checkpointing/format/boxes.py`). The files are therefore
the same as without sharding, and any number of ranks can resume from them, sharded in any way or not at all.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.errors import CheckpointError
from checkpointing.files.file_images import Extent, FileImage, bytes_of
from checkpointing.format.boxes import Cut, Placements, Range, Region, num_regions, region, runs, writers


@dataclass(frozen=True)
class Fragment:
    """What a rank holds of a flattened tensor, as DeepSpeed's ZeRO deals tensors out: consecutive elements in C order.

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


@dataclass(frozen=True)
class Part:
    """The part of a tensor that this rank holds.

    Attributes:
        shape: Shape of the whole tensor; flat where the part is a fragment.
        region: What of it this rank holds.
        tensor: The part itself, on the rank's device.
        guards: Tensors whose version counters together show any change in place.
        is_written: Whether this rank copies it, of all on this node that hold the same.
        distribution: How the tensor is distributed: the mesh's shape and the placements.
    """

    shape: tuple[int, ...]
    region: Region
    tensor: torch.Tensor
    guards: tuple[torch.Tensor, ...]
    is_written: bool
    distribution: str = ""


# By the storage of the stand-in for the whole tensor.
Parts = dict[int, Part]


def is_dtensor(value: object) -> bool:
    """Return whether a value is a `DTensor`, without importing the slow module, which is loaded if there is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_sharded(value: object) -> bool:
    """Return whether this rank may hold only a part: a `DTensor`, a `Fragment`, or a parameter of ZeRO-3."""
    return is_dtensor(value) or isinstance(value, Fragment) or is_partitioned(value)


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a whole tensor."""
    fragment = fragment_of(value)
    return fragment.shape if fragment is not None else tuple(value.shape)


def nbytes_of(value: Any) -> int:
    """Return the size of a whole tensor."""
    fragment = fragment_of(value)
    return fragment.nbytes if fragment is not None else int(value.nbytes)


def own_nbytes(value: Any) -> int:
    """Return how many bytes of a tensor this rank holds."""
    fragment = fragment_of(value)
    own = fragment.tensor if fragment is not None else value._local_tensor if is_dtensor(value) else value
    return int(own.nbytes)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, which all ranks that hold a part of it ask for together."""
    if is_partitioned(tensor):
        return assembled(tensor)
    whole: torch.Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return whole


def has_sharded(model: torch.nn.Module) -> bool:
    """Return whether any parameter is sharded."""
    return any(is_sharded(parameter) for parameter in model.parameters())


def part_of(tensor: Any, local_world_size: int = sys.maxsize) -> Part:
    """Return this rank's part of a sharded tensor; by default all ranks are on one node.

    Raises:
        CheckpointError: The tensor is a partial sum, or is not distributed as its placements say.
    """
    fragment = fragment_of(tensor)
    if fragment is not None:
        flat = (math.prod(fragment.shape),)
        own = Region((((fragment.first, fragment.last),),))
        return Part(flat, own, fragment.tensor, (fragment.tensor,), fragment.is_written, fragment.distribution)
    shape = tuple(tensor.shape)
    held, is_written, distribution = _held(tensor.device_mesh, shape, tuple(tensor.placements), local_world_size)
    # Not `to_local`: the tensor that it returns has a version counter of its own.
    local = tensor._local_tensor.detach()
    if local.numel() != math.prod(held.shape) or (local.numel() and tuple(local.shape) != held.shape):
        raise CheckpointError(
            f"a tensor of shape {shape} is distributed as {tensor.placements} over {tensor.device_mesh}, but this rank "
            f"holds {tuple(local.shape)} of it in place of {held.shape}: use sizes that the mesh divides"
        )
    return Part(shape, held, local, (tensor, tensor._local_tensor), is_written, distribution)


@functools.lru_cache(maxsize=16384)
def _held(
    mesh: Any, shape: tuple[int, ...], placements: tuple[Any, ...], local_world_size: int
) -> tuple[Region, bool, str]:
    """Return what this rank holds of a tensor, whether it copies that, and how it is distributed."""
    cuts, coordinate = cuts_of(placements), mesh.get_coordinate()
    if coordinate is None:
        raise CheckpointError(f"a tensor is distributed over {mesh}, to which this rank does not belong")
    rank, ranks = dist.get_rank(), mesh.mesh.flatten().tolist()
    writing = writers(ranks, mesh.shape, cuts, local_world_size)[rank // local_world_size]
    distribution = f"{placements} over {tuple(mesh.shape)}"
    return region(shape, mesh.shape, cuts, coordinate), rank in writing, distribution


def cuts_of(placements: Iterable[Any]) -> Placements:
    """Return how each dimension of a mesh cuts a `DTensor` of these placements; CheckpointError for a partial sum."""
    found: list[Cut | None] = []
    for placement in placements:
        if placement.is_replicate():
            found.append(None)
        elif hasattr(placement, "dim"):
            found.append(Cut(placement.dim, getattr(placement, "split_factor", 1)))
        else:
            raise CheckpointError(
                f"a tensor is distributed as {placements}: a partial sum is not state; reduce it first"
            )
    return tuple(found)


def stand_ins(obj: Any, parts: Parts, local_world_size: int = sys.maxsize) -> Any:
    """Return the same dicts, lists and tuples with a stand-in for every sharded tensor.

    A stand-in has the size of the whole tensor, but no contents, and no memory is touched for it. Shared tensors stay
    shared. `parts` receives this rank's part for every stand-in.
    """
    made: dict[int, torch.Tensor] = {}

    def replaced(obj: Any) -> Any:
        if is_sharded(obj):
            if id(obj) not in made:
                shape = shape_of(obj)
                # Not `torch.empty`, which fills memory under deterministic algorithms.
                memory = torch.UntypedStorage(math.prod(shape) * obj.dtype.itemsize)
                whole = made[id(obj)] = torch.empty(0, dtype=obj.dtype).set_(memory).view(shape)
                parts[whole.untyped_storage()._cdata] = part_of(obj, local_world_size)
            return made[id(obj)]
        if isinstance(obj, Mapping):
            return {key: replaced(value) for key, value in obj.items()}
        if isinstance(obj, list):
            return [replaced(value) for value in obj]
        return tuple(map(replaced, obj)) if type(obj) is tuple else obj

    return replaced(obj)


def is_stand_in(tensor: torch.Tensor, parts: Parts) -> bool:
    """Return whether a tensor only stands in for a sharded one."""
    return tensor.untyped_storage()._cdata in parts


def with_own_parts(image: FileImage, parts: Parts) -> FileImage:
    """Return the image with this rank's parts in place of the stand-ins."""
    kept = []
    for offset, tensor in image.tensors:
        part = parts.get(tensor.untyped_storage()._cdata)
        if part is None:
            kept.append((offset, tensor))
        elif part.is_written:
            image.own.extend(extent.shifted(offset) for extent in _extents(part))
    return dataclasses.replace(image, tensors=kept)


def _extents(part: Part) -> Iterator[Extent]:
    """Yield what this rank holds, with its places in the whole tensor."""
    for box in part.region.boxes():
        found = runs(box, part.shape, part.tensor.element_size())
        own = bytes_of(part.tensor[slices(box.own)].contiguous().view(-1))
        yield Extent(found.offset, own.view(*found.counts, found.length), found.strides, part.tensor)


def slices(ranges: Iterable[Range]) -> tuple[slice, ...]:
    """Return the index of a box."""
    return tuple(slice(first, last) for first, last in ranges)


def cut_like(whole: torch.Tensor, live: Any, *, in_place: bool = False) -> torch.Tensor:
    """Return this rank's part of a whole tensor, distributed like `live`; all of it where `live` is not sharded.

    The part is a copy, so that the whole tensor can be freed. Of a fragment, it is in one dimension.

    Args:
        whole: The tensor.
        live: The tensor that it is for, or anything else.
        in_place: Copy into `live`, and return that, where it is a sharded tensor in the host's memory.
    """
    if not is_sharded(live) or tuple(whole.shape) != shape_of(live):
        return whole
    part = part_of(live)
    target = own_memory(part, whole) if in_place else None
    if target is not None:
        own_part(whole, part, target)
        return live  # type: ignore[no-any-return]
    return distributed_like(own_part(whole, part), live)


def own_memory(part: Part, whole: torch.Tensor) -> torch.Tensor | None:
    """Return the memory of a part that the same part of `whole` can be copied to as it is; None if there is none."""
    own = part.tensor
    fits = own.device.type == "cpu" and own.dtype == whole.dtype and tuple(own.shape) == part.region.shape
    return own.detach() if fits and own.is_contiguous() else None


def distributed_like(own: torch.Tensor, live: Any) -> torch.Tensor:
    """Return this rank's part of a tensor as one that is distributed like `live`."""
    if not is_dtensor(live):
        return own
    from torch.distributed.tensor import DTensor

    cut: torch.Tensor = DTensor.from_local(
        own.to(live.device), live.device_mesh, live.placements, run_check=False, shape=live.shape, stride=live.stride()
    )
    return cut


def own_part(whole: torch.Tensor, part: Part, own: torch.Tensor | None = None) -> torch.Tensor:
    """Return a copy of what this rank holds of a whole tensor, in memory of its own unless that is given."""
    if own is None:
        own = torch.empty(part.region.shape, dtype=whole.dtype, device=whole.device)
    whole = whole.reshape(part.shape)
    for box in part.region.boxes():
        own[slices(box.own)] = whole[slices(box.whole)]
    return own


def fill(live: Any, cut: torch.Tensor) -> None:
    """Copy what `cut_like` returns into the live tensor, unless it is there already."""
    if cut is live:
        return
    fragment = fragment_of(live)
    (live if fragment is None else fragment.tensor).detach().copy_(cut)


def cut_optimizer_state(
    state: dict[str, Any], optimizer: Any, cut_like: Callable[[torch.Tensor, Any], torch.Tensor] = cut_like
) -> dict[str, Any]:
    """Return an optimizer's state dict, cut to this rank's parts where the optimizer's parameters are sharded.

    `cut_like` cuts a tensor like the parameter that it belongs to.

    Raises:
        ValueError: It is of another number of parameters.
    """
    # A user's own optimizer need not have groups.
    groups = getattr(optimizer, "param_groups", ())
    parameters = [parameter for group in groups for parameter in group["params"]]
    if not any(map(is_sharded, parameters)):
        return state
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if len(numbers) != len(parameters):
        raise ValueError(f"it has {len(numbers)} parameters, the optimizer has {len(parameters)}")
    cut = dict(state["state"])
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in cut:
            cut[number] = {
                name: cut_like(value, parameter) if isinstance(value, torch.Tensor) else value
                for name, value in cut[number].items()
            }
    return {**state, "state": cut}


def is_spread(model: torch.nn.Module, local_world_size: int) -> bool:
    """Return whether a mesh of the model that this rank knows is over nodes, of which none holds all; ranks may differ.

    Args:
        model: The model.
        local_world_size: Number of ranks on each node.
    """
    sharded = list[Any](filter(is_dtensor, model.parameters()))
    for mesh, placements in {(parameter.device_mesh, cuts_of(parameter.placements)) for parameter in sharded}:
        found = writers(mesh.mesh.flatten().tolist(), mesh.shape, placements, local_world_size)
        needed = num_regions(mesh.shape, placements)
        if any(len(writing) < needed for writing in found.values()):
            return True
    return False
