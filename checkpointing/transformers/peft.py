"""The adapter of a PEFT model: what is saved of it, and its configuration."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import accelerate
import torch
from torch.nn.modules.batchnorm import _NormBase

from checkpointing.errors import CheckpointError
from checkpointing.state.adapter import Adapter, live_tensors


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


class RunningStatistics:
    """What training changes in the base of an adapter, of BatchNorm, as an object with a state."""

    def __init__(self, model: Any) -> None:
        """Follow a PEFT model."""
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the statistics by name."""
        return {
            f"{name}.{key}": value
            for name, module in self._model.named_modules()
            if isinstance(module, _NormBase)
            for key, value in module.named_buffers(recurse=False)
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the statistics."""
        for name, value in self.state_dict().items():
            if name in state:
                value.copy_(state[name])
