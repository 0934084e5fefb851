"""The weights of the model that is fine-tuned, left out where a checkpoint is about to replace them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback


class BaseWeights(TrainerCallback):
    """Fetches them after all where nothing was resumed.

    A model that was loaded by name is backed by memory-mapped files, whose pages are read on first access. A restarted
    rank that moved it to its GPU would read and copy all of them, only for the restore to overwrite them.
    """

    def __init__(self, model: torch.nn.Module, load: Callable[[], torch.nn.Module], device: torch.device) -> None:
        """Put memory that nothing was written to, on the device, in the place of all parameters.

        Args:
            load: the same model with its weights; draws no random numbers that count.
        """
        self._model, self._load = model, load
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data = torch.empty_like(parameter, device=device)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # A checkpoint is of a step from 1 on, and has every parameter: it is loaded strictly.
        if state.global_step > 0:
            return
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            loaded = dict(self._load().named_parameters())
            for name, parameter in self._model.named_parameters():
                parameter.copy_(loaded[name])
