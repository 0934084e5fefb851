"""Nested dicts, lists and tuples with tensors in them, as `state_dict` methods return them."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

# These numpy scalars equal Python's in every respect. Converting others would lose their type, and so how they round.
_EXACT: dict[type, type] = {np.float64: float, np.int64: int, np.bool_: bool}


class FrozenDeque(deque[Any]):
    """A deque that is pickled as one which a reader with `weights_only` can build: by its items, not by appending."""

    def __reduce__(self) -> tuple[Any, ...]:
        return deque, (list(self), self.maxlen)


class FrozenDefaultDict(defaultdict[Any, Any]):
    """A defaultdict that is pickled as one which a reader with `weights_only` can build, see `FrozenDeque`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (self.default_factory, dict(self))


def freeze(obj: Any) -> Any:
    """Copy the containers around the same tensors, so that later replacements in the original do not show."""
    # The training thread waits for this: `isinstance` is much faster for dict than for Mapping.
    if isinstance(obj, dict):
        frozen = {key: freeze(value) for key, value in obj.items()}
        if type(obj) is defaultdict:
            return FrozenDefaultDict(obj.default_factory, frozen)
        return frozen if type(obj) is dict else _like(obj, frozen)
    if isinstance(obj, torch.Tensor):
        return obj
    if type(obj) is deque:
        return FrozenDeque(map(freeze, obj), obj.maxlen)
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
    """Return the tensors inside nested dicts, lists, tuples and deques, in order."""
    if isinstance(obj, torch.Tensor):
        return [obj]
    inner: Iterable[object] = ()
    if isinstance(obj, (list, tuple, deque)):
        inner = obj
    elif isinstance(obj, (dict, Mapping)):
        inner = obj.values()
    return [tensor for value in inner for tensor in tensors_in(value)]


def kinds_in(obj: object, found: set[object]) -> None:
    """Add to a set what decides whether a tree can be read back: the types in it; tensors are of one kind.

    The training thread waits for this at each snapshot.
    """
    found.add(type(obj))
    inner: Iterable[object] = ()
    if isinstance(obj, (dict, Mapping)):
        found.update(map(type, obj))
        inner = obj.values()
        if isinstance(obj, defaultdict):
            found.add(obj.default_factory)
    elif isinstance(obj, (list, tuple, deque)):
        inner = obj
    elif isinstance(obj, (np.ndarray, np.generic)):
        found.add(obj.dtype)
    for value in inner:
        if not isinstance(value, torch.Tensor):
            kinds_in(value, found)


def replaced(obj: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same dicts, lists, tuples and deques with `change` applied to every leaf.

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
        if isinstance(obj, defaultdict):
            made = type(obj)(obj.default_factory, made)
        else:
            made = made if type(obj) is dict else type(obj)(made)
    elif type(obj) in (list, tuple):
        made = type(obj)(_replaced(value, change, done) for value in obj)
    elif isinstance(obj, deque):
        made = type(obj)((_replaced(value, change, done) for value in obj), obj.maxlen)
    else:
        return change(obj)
    done[id(obj)] = made
    return made


def _holds_tensor(key: Any) -> bool:
    return isinstance(key, torch.Tensor) or (isinstance(key, tuple) and any(map(_holds_tensor, key)))
