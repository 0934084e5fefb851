"""Overrides of a trainer's saving methods: whether there are any, and what they have written."""

from __future__ import annotations

import re
from pathlib import Path

# Those of these packages do nothing that a checkpoint does not hold: TRL's write a model card.
_KNOWN_PACKAGES = ("transformers.", "trl.", "checkpointing.")
_METHODS = ("_save_checkpoint", "save_model", "_save")
# What a stock Trainer writes, and a checkpoint holds already.
_OURS = re.compile(
    r"(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)|model\.safetensors\.index\.json|"
    r"pytorch_model\.bin\.index\.json|optimizer\.(pt|bin)|scheduler\.pt|scaler\.pt|rng_state(_\d+)?\.pth|"
    r"trainer_state\.json|training_args\.bin"
)


def overrides_saving(cls: type) -> bool:
    """Whether a class of the user's own has a say in what is saved."""
    return any(
        name in vars(base) and not (base.__module__ + ".").startswith(_KNOWN_PACKAGES)
        for base in cls.__mro__
        for name in _METHODS
    )


def added_files(folder: Path) -> dict[str, bytes]:
    """Files in a folder, by their path in it, that a checkpoint would not hold by itself."""
    if not folder.is_dir():
        return {}
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = ((path.relative_to(folder).as_posix(), path) for path in paths)
    return {name: path.read_bytes() for name, path in names if not _OURS.fullmatch(name)}
