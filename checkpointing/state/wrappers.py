"""Modules that wrap a model: they change the names of its parameters, which are no part of a checkpoint."""

from __future__ import annotations

import sys
from typing import Any

import torch


def is_wrapped(model: object) -> bool:
    """Return whether a model is in the wrapper of DDP or of torch.compile."""
    return isinstance(model, torch.nn.parallel.DistributedDataParallel) or _is_compiled(model)


def unwrapped(model: Any) -> Any:
    """Return what is in the wrapper of DDP or of torch.compile, which may be another wrapper."""
    return model._orig_mod if _is_compiled(model) else model.module


def innermost(model: Any) -> Any:
    """Return what is in all of these wrappers."""
    while is_wrapped(model):
        model = unwrapped(model)
    return model


def _is_compiled(model: object) -> bool:
    # Nothing is compiled before this is imported, which takes a second.
    module = sys.modules.get("torch._dynamo.eval_frame")
    return module is not None and isinstance(model, module.OptimizedModule)
