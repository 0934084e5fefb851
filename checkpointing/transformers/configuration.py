"""Model configuration and tokenizer, in the files that `from_pretrained` reads."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from checkpointing.transformers.peft import save_adapter_config


def configuration_files(
    model: Any, processing_class: Any, scratch: Path, *, is_adapter: bool, is_fsdp: bool
) -> dict[str, bytes]:
    """Return the files by name.

    Args:
        model: The trainer's model.
        processing_class: Its tokenizer or processor, if any.
        scratch: Where a temporary folder may be made.
        is_adapter: Only a PEFT adapter is saved.
        is_fsdp: FSDP2 has put a class of its own in front of the model's.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        if is_adapter:
            save_adapter_config(model, folder)
        else:
            _save_model_config(model, folder, is_fsdp=is_fsdp)
        if processing_class is not None:
            processing_class.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def _save_model_config(model: Any, folder: str, *, is_fsdp: bool) -> None:
    config = getattr(model, "config", None)
    if config is not None:
        architecture = type(model).__bases__[1] if is_fsdp else type(model)
        config.architectures = [architecture.__name__]
        config.save_pretrained(folder)
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None:
        generation_config.save_pretrained(folder)
