"""Deferred loading of the base model's weights, which a resume would overwrite anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback


class BaseWeights(TrainerCallback):
    """Loads the weights when training begins, unless a checkpoint was resumed.

    A model that was loaded by name is backed by memory-mapped files, whose pages are read on first access. A restarted
    rank that moved it to its GPU would read and copy all of them, only for the restore to overwrite them.
    """

    def __init__(self, model: torch.nn.Module, load: Callable[[], torch.nn.Module], device: torch.device) -> None:
        """Replace all parameters by uninitialised memory on the device.

        Args:
            model: The model.
            load: Loads the same model with its weights, without drawing random numbers that matter.
            device: Device of the parameters.
        """
        self._model, self._load = model, load
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data = torch.empty_like(parameter, device=device)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Load the weights if nothing was resumed."""
        # A checkpoint is of step 1 or later and contains every parameter, because it is loaded strictly.
        if state.global_step > 0:
            return
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            loaded = dict(self._load().named_parameters())
            for name, parameter in self._model.named_parameters():
                parameter.copy_(loaded[name])
