"""What is saved of a PEFT model."""

from __future__ import annotations

import copy
import functools
from typing import Any

import accelerate

from checkpointing.errors import CheckpointError
from checkpointing.rank.adapter import Adapter, live_tensors


def adapter_of(model: Any) -> Adapter | None:
    """What is saved of a PEFT model; None for any other.

    Raises:
        CheckpointError: it has several adapters.
    """
    if not accelerate.utils.is_peft_model(model):
        return None
    from peft import get_peft_model_state_dict

    if len(model.peft_config) != 1:
        raise CheckpointError(f"resilient() saves one adapter; this model has {', '.join(model.peft_config)}")
    # "auto" would ask the hub whether the vocabulary was resized.
    select: Any = functools.partial(
        get_peft_model_state_dict, model, adapter_name=model.active_adapter, save_embedding_layers=False
    )
    saved = {id(tensor) for tensor in select(state_dict=live_tensors(model)).values()}
    if any(parameter.requires_grad and id(parameter) not in saved for parameter in model.parameters()):
        # Prompts that are computed, or weights that were unfrozen beside the adapter: all of it is saved, as it is.
        return None
    return Adapter(lambda state: select(state_dict=dict(state)), getattr(model.config, "name_or_path", "") or "")


def save_adapter_config(model: Any, folder: str) -> None:
    """`adapter_config.json` as `PeftModel.save_pretrained` writes it."""
    config = copy.copy(model.peft_config[model.active_adapter])
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(model.config, "name_or_path", None)
    config.save_pretrained(folder)
