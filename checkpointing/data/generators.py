"""Random number generators that objects hold as attributes: finding, seeding, saving and restoring them."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

# Levels of attributes that are searched for generators.
_MAX_DEPTH = 2
_MAX_ITEMS = 64
_CONTAINERS = (list, tuple, dict)
_SIMPLE = (int, float, str, bool, type(None))
_NUMPY_BIT_GENERATORS = (
    np.random.MT19937,
    np.random.PCG64,
    np.random.PCG64DXSM,
    np.random.Philox,
    np.random.SFC64,
)


def generators_of(*owners: object) -> Iterator[tuple[str, Any]]:
    """Iterate over the generators that objects hold, each one once, with the attribute's path.

    The search covers attributes, short lists, tuples and dicts in them, the object of a bound method, the parts of a
    `functools.partial` and what a function closes over.
    """
    # Depth that was left when each object was searched.
    seen: dict[int, int] = {}

    def walk(owner: object, path: str, depth: int, in_items: bool) -> Iterator[tuple[str, Any]]:
        if seen.get(id(owner), -1) >= depth:
            return
        is_new, seen[id(owner)] = id(owner) not in seen, depth
        if isinstance(owner, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
            seen[id(owner)] = _MAX_DEPTH
            if is_new:
                yield path, owner
        else:
            for value, name, left, is_item in _parts_of(owner, depth, in_items):
                yield from walk(value, path + name, left, is_item)

    for number, owner in enumerate(owners):
        yield from walk(owner, str(number), _MAX_DEPTH, False)


def _parts_of(owner: object, depth: int, in_items: bool) -> Iterator[tuple[object, str, int, bool]]:
    """Yield what an object holds: the value, its name, the depth that is left, and whether it is in a container."""
    if isinstance(owner, functools.partial):
        for number, value in enumerate([owner.func, *owner.args, *owner.keywords.values()]):
            yield value, f"({number})", depth, in_items
    elif isinstance(owner, _CONTAINERS):
        # Such as the transforms of a composition. Long ones, and those inside others, are data.
        items = owner.values() if isinstance(owner, dict) else owner
        for number, value in enumerate(items) if len(owner) <= _MAX_ITEMS and not in_items else ():
            if not isinstance(value, _SIMPLE):
                yield value, f"[{number}]", depth, True
    elif depth and not isinstance(owner, (type, types.ModuleType, torch.Tensor, torch.nn.Module)):
        attributes = [(name, value) for name, value in _attributes_of(owner).items() if not isinstance(value, _SIMPLE)]
        # Containers last: what is found in both ways has the path of the attribute.
        for name, value in sorted(attributes, key=lambda one: isinstance(one[1], _CONTAINERS)):
            yield value, f".{name}", depth if isinstance(value, _CONTAINERS) else depth - 1, in_items


def _attributes_of(owner: object) -> dict[str, Any]:
    if isinstance(owner, types.MethodType):
        return {"__self__": owner.__self__}
    attributes: dict[str, Any] = dict(getattr(owner, "__dict__", {}))
    if isinstance(owner, types.FunctionType):
        cells = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
        attributes |= {name: cell.cell_contents for name, cell in cells if not _is_empty(cell)}
    return attributes


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def reseed(generator: Any, seed: int) -> None:
    """Seed a generator of any supported kind."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    else:
        generator.seed(seed % 2**32)


def generator_state(generator: Any) -> Any:
    """Return the state of a generator, made of plain values and tensors."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return without_arrays(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return without_arrays(generator.get_state())
    return generator.getstate()


def set_generator_state(generator: Any, state: Any) -> None:
    """Restore what `generator_state` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = with_arrays(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(with_arrays(state))
    else:
        generator.setstate(state)


def new_generator(state: Any) -> Any:
    """Create a generator of the kind that a state belongs to, in that state.

    Raises:
        ValueError: The state does not fit its kind of generator.
        TypeError: Likewise.
        KeyError: The state names an unknown kind of generator.
        RuntimeError: torch refuses the state.
    """
    if isinstance(state, torch.Tensor):
        generator: Any = torch.Generator()
    elif isinstance(state, Mapping):
        kinds = {kind.__name__: kind for kind in _NUMPY_BIT_GENERATORS}
        generator = np.random.Generator(kinds[state["bit_generator"]]())
    else:
        generator = np.random.RandomState() if isinstance(state[0], str) else random.Random()
    set_generator_state(generator, state)
    return generator


def without_arrays(state: Any) -> Any:
    """Replace numpy arrays by plain values, so that any reader with `weights_only` can read the state."""
    if isinstance(state, Mapping):
        return {name: without_arrays(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return tuple(without_arrays(value) for value in state)
    if isinstance(state, np.ndarray):
        return {"array": state.tolist(), "dtype": state.dtype.str}
    return state.item() if isinstance(state, np.generic) else state


def with_arrays(state: Any) -> Any:
    """Undo `without_arrays`."""
    if isinstance(state, Mapping):
        if state.keys() == {"array", "dtype"}:
            return np.array(state["array"], dtype=state["dtype"])
        return {name: with_arrays(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return tuple(with_arrays(value) for value in state)
    return state
