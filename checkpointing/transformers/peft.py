"""The adapter of a PEFT model: what is saved of it, and its configuration."""

from __future__ import annotations

import copy
import functools
from typing import Any

import accelerate
from torch.nn.modules.batchnorm import _NormBase

from checkpointing.errors import CheckpointError
from checkpointing.rank.adapter import Adapter, live_tensors


def adapter_of(model: Any) -> Adapter | None:
    """Return what is saved of a PEFT model; None if the whole model is saved.

    Raises:
        CheckpointError: The model has several adapters.
    """
    if not accelerate.utils.is_peft_model(model):
        return None
    from peft import get_peft_model_state_dict

    if len(model.peft_config) != 1:
        raise CheckpointError(f"resilient() saves one adapter; this model has {', '.join(model.peft_config)}")
    # The default, "auto", would query the hub for the vocabulary's original size.
    select: Any = functools.partial(
        get_peft_model_state_dict, model, adapter_name=model.active_adapter, save_embedding_layers=False
    )
    saved = {id(tensor) for tensor in select(state_dict=live_tensors(model)).values()}
    if any(parameter.requires_grad and id(parameter) not in saved for parameter in model.parameters()):
        # Prompts that are computed, or weights unfrozen in addition to the adapter: the whole model is saved.
        return None
    if any(isinstance(module, _NormBase) and module.running_mean is not None for module in model.modules()):
        # Training changes the running statistics of the base.
        return None
    # The base need not be a model of transformers.
    base = getattr(getattr(model, "config", None), "name_or_path", "") or ""
    return Adapter(lambda state: select(state_dict=dict(state)), base)


def save_adapter_config(model: Any, folder: str) -> None:
    """Write `adapter_config.json` as `PeftModel.save_pretrained` does."""
    config = copy.copy(model.peft_config[model.active_adapter])
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(model.config, "name_or_path", None)
    config.save_pretrained(folder)
