"""A script's overrides of the trainer's saving methods: run in a staging folder, for the files that they add."""

from __future__ import annotations

import contextlib
import copy
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Overrides in these packages add nothing that a checkpoint needs: TRL's write a model card.
_KNOWN_PACKAGES = ("transformers.", "trl.", "checkpointing.")
_METHODS = ("_save_checkpoint", "save_model", "_save")
# Files that a stock Trainer writes, and that a checkpoint holds already.
_STOCK_FILES = re.compile(
    r"(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)|model\.safetensors\.index\.json|"
    r"pytorch_model\.bin\.index\.json|optimizer\.(pt|bin)|scheduler\.pt|scaler\.pt|rng_state(_\d+)?\.pth|"
    r"trainer_state\.json|training_args\.bin"
)


def overrides_saving(cls: type) -> bool:
    """Return whether a class of the script overrides what is saved."""
    return any(
        name in vars(base) and not (base.__module__ + ".").startswith(_KNOWN_PACKAGES)
        for base in cls.__mro__
        for name in _METHODS
    )


def added_files(folder: Path) -> dict[str, bytes]:
    """Return the files in a folder, by their path in it, that a checkpoint would not hold by itself."""
    if not folder.is_dir():
        return {}
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = ((path.relative_to(folder).as_posix(), path) for path in paths)
    return {name: path.read_bytes() for name, path in names if not _STOCK_FILES.fullmatch(name)}


class Staging:
    """A folder in which the trainer's own methods write a checkpoint that is never resumed from.

    Attributes:
        folder: Of the save that runs now; None if none does.
    """

    def __init__(self) -> None:
        """Begin without a folder."""
        self.folder: str | None = None

    @contextlib.contextmanager
    def opened(self, args: Any, state: Any, scratch: Path) -> Iterator[Path]:
        """Direct what the trainer writes into a staging folder.

        Args:
            args: The trainer's `TrainingArguments`; their `output_dir` is the folder meanwhile.
            state: Its `TrainerState`; what the Trainer changes in it when it saves is taken back.
            scratch: Where to make the folder.

        Yields:
            The folder of the checkpoint. It exists on all ranks, as those that write nothing may look into it, too.
        """
        callbacks, output_dir = state.stateful_callbacks, args.output_dir
        with tempfile.TemporaryDirectory(prefix="checkpoint-staging-", dir=scratch) as folder:
            self.folder = args.output_dir = folder
            checkpoint = Path(folder, f"checkpoint-{state.global_step}")
            checkpoint.mkdir()
            state.stateful_callbacks = copy.deepcopy(callbacks)
            try:
                yield checkpoint
            finally:
                self.folder, args.output_dir = None, output_dir
                state.stateful_callbacks = callbacks
