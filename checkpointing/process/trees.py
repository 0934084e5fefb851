"""Nested dicts, lists and tuples with tensors in them, as `state_dict` methods return them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

# These numpy scalars equal Python's in every respect. Converting others would lose their type, and so how they round.
_EXACT: dict[type, type] = {np.float64: float, np.int64: int, np.bool_: bool}


def freeze(obj: Any) -> Any:
    """Copy the containers around the same tensors, so that later replacements in the original do not show."""
    # The training thread waits for this: `isinstance` is much faster for dict than for Mapping.
    if isinstance(obj, dict):
        frozen = {key: freeze(value) for key, value in obj.items()}
        return frozen if type(obj) is dict else _like(obj, frozen)
    if isinstance(obj, torch.Tensor):
        return obj
    if isinstance(obj, list):
        return [freeze(value) for value in obj]
    if type(obj) is tuple:
        return tuple(freeze(value) for value in obj)
    if isinstance(obj, Mapping):
        return {key: freeze(value) for key, value in obj.items()}
    if isinstance(obj, np.generic):
        return _EXACT[type(obj)](obj) if type(obj) in _EXACT else obj
    return obj


def _like(obj: dict[Any, Any], frozen: dict[Any, Any]) -> dict[Any, Any]:
    """Return the frozen items in a dict of the original's type, or the original where that cannot be constructed.

    `check_readable` refuses the original later, by its path.
    """
    try:
        made = copy.copy(obj)
        # Not `update`: a Counter adds what it is given.
        for key, value in frozen.items():
            made[key] = value
    except Exception:
        return obj
    return made


def tensors_in(obj: object) -> list[torch.Tensor]:
    """Return the tensors inside nested dicts, lists and tuples, in order."""
    if isinstance(obj, torch.Tensor):
        return [obj]
    inner: Iterable[object] = ()
    if isinstance(obj, (list, tuple)):
        inner = obj
    elif isinstance(obj, (dict, Mapping)):
        inner = obj.values()
    return [tensor for value in inner for tensor in tensors_in(value)]


def replaced(obj: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same dicts, lists and tuples with `change` applied to every leaf.

    A container that occurs twice in the original occurs twice in the result, too.

    Raises:
        ValueError: A key of a dict is a tensor. No optimizer does this, and such a tensor could not be replaced.
    """
    return _replaced(obj, change, {})


def _replaced(obj: Any, change: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    """Recurse for `replaced`; `done` maps the identity of each container to its replacement."""
    if id(obj) in done:
        return done[id(obj)]
    if isinstance(obj, dict):
        if any(_holds_tensor(key) for key in obj):
            raise ValueError("a key of a dict is a tensor")
        made: Any = {key: _replaced(value, change, done) for key, value in obj.items()}
        made = made if type(obj) is dict else type(obj)(made)
    elif type(obj) in (list, tuple):
        made = type(obj)(_replaced(value, change, done) for value in obj)
    else:
        return change(obj)
    done[id(obj)] = made
    return made


def _holds_tensor(key: Any) -> bool:
    return isinstance(key, torch.Tensor) or (isinstance(key, tuple) and any(map(_holds_tensor, key)))
