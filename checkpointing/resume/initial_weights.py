"""Weights of another run, or of any model, with which a new run begins; nothing else of it is read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from checkpointing.commit.catalog import verify
from checkpointing.errors import CheckpointError
from checkpointing.format.layout import ANY_ADAPTER_NAMES, ANY_MODEL_NAMES
from checkpointing.resume.agreement import own_checkpoint

_OPTION = "--init-from"


@dataclass
class InitialWeights:
    """What was taken over.

    Attributes:
        folder: From where.
        loaded: Number of tensors.
        resized: By name, how many rows of how many: an embedding for another vocabulary, say.
        missing: Tensors of the model that the folder does not have; they stay as the script made them.
        unused: Tensors that the model does not have.
    """

    folder: str
    loaded: int = 0
    resized: dict[str, tuple[int, int]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """Return it as one line."""
        parts = [f"{self.loaded} tensors from {self.folder}"]
        parts += [f"{name}: {rows} of {of} rows" for name, (rows, of) in self.resized.items()]
        for names, what in ((self.missing, "not there, so new"), (self.unused, "not used")):
            if names:
                parts.append(f"{what}: {', '.join(names[:3])}{f' and {len(names) - 3} more' if names[3:] else ''}")
        return "; ".join(parts)


def load_initial_weights(model: torch.nn.Module, folder: str, trained: Iterable[torch.Tensor] = ()) -> InitialWeights:
    """Load what a folder has of a model's weights: a checkpoint, a model, or an adapter, in Hugging Face's files.

    A tensor that differs in its first dimension only, such as an embedding for another vocabulary, is loaded row by row
    as far as both go. Names are those of the model; an adapter that is wrapped around it changes nothing.

    Args:
        model: Whole on each rank, as it is before FSDP or a mesh cut it.
        folder: A local folder.
        trained: What an optimizer changes, if there is one already: where these are copies of the weights, as DeepSpeed
            makes them, they would overwrite what is loaded.

    Returns:
        What was loaded.

    Raises:
        CheckpointError: The folder holds no weights, is damaged, or is of another model; or the model is sharded.
    """
    path, found = Path(folder), InitialWeights(folder)
    parameters = {id(parameter) for parameter in model.parameters()}
    if not all(id(one) in parameters for one in trained):
        raise CheckpointError(
            f"{_OPTION} {folder}: the optimizer has copies of the weights already, as DeepSpeed's and those with fp32 "
            "masters do, which would overwrite what is loaded; let the script load them before it makes the optimizer"
        )
    if (own := own_checkpoint(path)) is not None:
        verify(*own)
    state = model.state_dict(keep_vars=True)
    targets = {_plain(name): tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    taken: set[str] = set()
    with torch.no_grad():
        for file in _files(path):
            for name, tensor in _tensors(file):
                target = targets.get(_plain(name))
                if target is None:
                    found.unused.append(name)
                    continue
                rows = _fill(target, tensor, name, folder)
                if rows is not None:
                    found.resized[_plain(name)] = rows, len(target)
                found.loaded += 1
                taken.add(_plain(name))
    # Of tied weights, files have one.
    filled = {targets[name].data_ptr() for name in taken}
    found.missing = [name for name, target in targets.items() if target.data_ptr() not in filled and target.numel()]
    if not found.loaded:
        raise CheckpointError(f"{_OPTION} {folder}: none of its tensors is one of the model; is it of another kind?")
    return found


def _plain(name: str) -> str:
    """Return a tensor's name without what PEFT and torch.compile put around a model."""
    name = name.removeprefix("module.").removeprefix("_orig_mod.").removeprefix("base_model.model.")
    return name.replace(".base_layer.", ".").replace(".default.", ".").replace(".modules_to_save.", ".")


def _files(folder: Path) -> list[Path]:
    """Return the files with weights, each tensor in one of them; raises CheckpointError."""
    # A whole model before its adapter.
    found = [
        next(filter(Path.is_file, (folder / name for name in names)), None)
        for names in (ANY_MODEL_NAMES, ANY_ADAPTER_NAMES)
    ]
    if not any(found):
        raise CheckpointError(
            f"{_OPTION} {folder}: no {', '.join(ANY_MODEL_NAMES + ANY_ADAPTER_NAMES)}; give the folder of a model or a "
            "checkpoint (of one that is in shards, what runner checkpoints export makes of it)"
        )
    return [file for one in found if one is not None for file in _parts(one)]


def _parts(file: Path) -> list[Path]:
    """Return the files that an index names; any other file as it is."""
    if file.suffix != ".json":
        return [file]
    try:
        return [
            file.with_name(Path(part).name) for part in sorted(set(json.loads(file.read_text())["weight_map"].values()))
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{_OPTION} {file}: the index cannot be read: {error}") from None


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        if file.suffix == ".safetensors":
            content: Any = load_file(file)
        else:
            content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{_OPTION} {file}: it cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{_OPTION} {file}: it is not a state dict")
    yield from ((name, value) for name, value in content.items() if isinstance(value, torch.Tensor))


def _fill(target: torch.Tensor, source: torch.Tensor, name: str, folder: str) -> int | None:
    """Copy a tensor; return the number of rows where not all of them are common, None where the shapes are equal."""
    if hasattr(target, "device_mesh") or target.numel() == 0 != source.numel():
        raise CheckpointError(f"{_OPTION} {folder}: {name} is sharded already; load it before FSDP, a mesh or ZeRO 3")
    is_exact = target.is_floating_point() and target.element_size() > 1
    if target.dtype != source.dtype and not (is_exact and source.is_floating_point() and source.element_size() > 1):
        raise CheckpointError(
            f"{_OPTION} {folder}: {name} is of type {source.dtype}, and {target.dtype} in the model: quantized weights "
            "have scales of their own; let the script load them"
        )
    if target.shape == source.shape:
        target.copy_(source)
        return None
    if target.dim() != source.dim() or target.dim() == 0 or target.shape[1:] != source.shape[1:]:
        raise CheckpointError(
            f"{_OPTION} {folder}: {name} has the shape {tuple(source.shape)} and {tuple(target.shape)} in the model"
        )
    rows = min(len(target), len(source))
    target[:rows].copy_(source[:rows])
    return rows
