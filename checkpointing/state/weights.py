"""Loads a model's weights from a checkpoint, whole or cut."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from checkpointing.errors import CheckpointError
from checkpointing.files import sharding
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.format.layout import BUFFERS_NAME, EXTRA_STATE_NAME, MODEL_NAME, rank_object_name

logger = logging.getLogger("checkpointing")


def load_whole(model: torch.nn.Module, point: LoadedCheckpoint, place: Callable[[Any], Any]) -> None:
    """Load all weights as the module itself does, which cuts `DTensor`s.

    Args:
        model: The model.
        point: The state to load from.
        place: Moves a state dict to the device where it is wanted.

    Raises:
        CheckpointError: The checkpoint is of another model.
    """
    whole = point.model_state()
    if point.has(name := point.own_name(BUFFERS_NAME)):
        _put_in(model, {buffer: whole[buffer] for buffer in point.json(name).get("names", ()) if buffer in whole})
    # `state_dict` also shards again what an evaluation has left whole.
    live = model.state_dict()
    cut = {name: point.cut(MODEL_NAME, value, live.get(name), in_place=True) for name, value in whole.items()}
    # Parameters and buffers are copied into. A module may keep anything else, so that must not be the checkpoint's.
    copied = _copied_into(model)
    cut |= {name: value.clone() for name, value in cut.items() if name not in copied}
    state: dict[str, Any] = place(cut)
    state |= _extra_state(point)
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise _misfit(point, str(error)) from None


def load_parts(model: torch.nn.Module, point: LoadedCheckpoint, *, is_part: bool = False) -> dict[str, torch.Tensor]:
    """Copy the weights into a model of whose parameters each rank may hold a fragment; return them, by name.

    Args:
        model: The model.
        point: The state to load from.
        is_part: The model is a part of what the checkpoint holds.

    Raises:
        CheckpointError: The checkpoint is of another model; nothing has been changed then.
    """
    whole = point.model_state()
    live = model.state_dict(keep_vars=True)
    extra = {name for name, value in live.items() if not isinstance(value, torch.Tensor)}
    names = live.keys() - extra
    if is_part:
        whole = {name: value for name, value in whole.items() if name in names}
    if names != whole.keys():
        missing, unknown = sorted(names - whole.keys()), sorted(whole.keys() - names)
        raise _misfit(point, f"it lacks {missing[:3]}, and has {unknown[:3]} besides")
    for name, value in whole.items():
        if sharding.shape_of(live[name]) != tuple(value.shape):
            shapes = f"{tuple(value.shape)}, here {sharding.shape_of(live[name])}"
            raise _misfit(point, f"the shape of {name} is {shapes}")
    copied, made = _copied_into(model), dict[str, Any]()
    for name, value in whole.items():
        cut = point.cut(MODEL_NAME, value, live[name], in_place=True)
        if name in copied:
            sharding.fill(live[name], cut)
        else:
            # What `get_extra_state` has made is no part of the module: it is handed back.
            made[name] = cut.clone()
    found = {name: value for name, value in _extra_state(point).items() if name in live}
    if lacking := sorted(extra - found.keys()):
        # Earlier releases kept that of the first stage only.
        logger.warning("%s holds no extra state of %s, which begin with a new one", point.label, ", ".join(lacking[:3]))
    if made := made | found:
        model.load_state_dict(made, strict=False)
    return whole


def _extra_state(point: LoadedCheckpoint) -> dict[str, Any]:
    """Return what modules have returned from `get_extra_state`, by name: this rank's own first, then the first rank's.

    Raises:
        InvalidCheckpoint: A file cannot be parsed.
    """
    found: dict[str, Any] = {}
    everyones = [rank_object_name(EXTRA_STATE_NAME, rank) for rank in reversed(range(point.world_size))]
    for name in [*everyones, EXTRA_STATE_NAME, point.own_name(EXTRA_STATE_NAME)]:
        if point.has(name):
            found |= point.own_object(name)
    return found


def _put_in(model: torch.nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Make room for buffers that training has made, or changed, by the names that they have in a checkpoint."""
    modules = dict(model.named_modules())
    for name, value in buffers.items():
        prefix, _, own_name = name.rpartition(".")
        module = modules.get(prefix)
        if module is None or own_name in module._parameters:
            # Loading says that the model is another one.
            continue
        before = module._buffers.get(own_name)
        near = [before, *module.parameters(), *module.buffers(), *model.parameters()]
        device = next((one.device for one in near if one is not None), torch.device("cpu"))
        made = torch.empty_like(value, device=device)
        if own_name in module._buffers:
            module._buffers[own_name] = made
        else:
            module.register_buffer(own_name, made)


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether several elements are one in memory, to which torch does not write."""
    return tensor.layout is torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _copied_into(model: torch.nn.Module) -> set[str]:
    """Return the names of what a load copies into, as in state dicts, whose names wrappers may change."""
    owned = {id(value) for value in (*model.parameters(), *model.buffers())}
    return {name for name, value in model.state_dict(keep_vars=True).items() if id(value) in owned}


def _misfit(point: LoadedCheckpoint, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{point.label} does not fit this model: {reason.rstrip('. ')}. Use the model that wrote it, or another "
        "output_dir."
    )
