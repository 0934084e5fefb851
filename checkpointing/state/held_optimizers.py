"""Optimizers around others: wrappers that only pass on, and those that hold others and may keep state of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from checkpointing.errors import CheckpointError
from checkpointing.files.torch_files import check_readable
from checkpointing.format.layout import OPTIMIZER_NAME
from checkpointing.process.trees import freeze, replaced, tensors_in
from checkpointing.state.optimizer_memory import OptimizerMemory

# Of accelerate and Lightning, by name, so that neither is imported: their state dicts are those of what they wrap.
_PASSING_ON = {"AcceleratedOptimizer", "_FabricOptimizer", "LightningOptimizer"}
# What torch's own code keeps in an optimizer: for each parameter, or no optimizer.
_OF_TORCH = {"state", "param_groups", "defaults"}


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer in the wrapper of accelerate or Lightning; any other is returned itself.

    One that merely has another in `optimizer` may have state besides, and its own way to load it.
    """
    while any(base.__name__ in _PASSING_ON for base in type(optimizer).__mro__):
        optimizer = optimizer.optimizer
    return optimizer


def held_by(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of torch that one holds: in its attributes, in containers there, and in those again."""
    found: dict[int, torch.optim.Optimizer] = {}
    waiting = [optimizer]
    while waiting:
        own = getattr(waiting.pop(), "__dict__", {})
        held = {id(one): one for key, value in own.items() if key not in _OF_TORCH for one in _optimizers_in(value)}
        new = [one for key, one in held.items() if key not in found and one is not optimizer]
        found |= {id(one): one for one in new}
        waiting += new
    return list(found.values())


def _optimizers_in(value: Any) -> Iterator[torch.optim.Optimizer]:
    if isinstance(value, torch.optim.Optimizer):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _optimizers_in(one)


def announces_steps(optimizer: Any) -> bool:
    """Return whether torch calls the hooks before a step of an optimizer before that changes anything.

    It does by what the constructor of its `Optimizer` makes of `step`, which a wrapper may not call. One that holds
    another may write before it has that one step, or in methods that have no hooks (SAM's `first_step`).
    """
    is_hooked = isinstance(optimizer, torch.optim.Optimizer) and getattr(type(optimizer).step, "hooked", False)
    return bool(is_hooked) and not held_by(optimizer)


def is_of_torch(state: Any) -> bool:
    """Return whether a state dict has the layout of torch's: groups of numbered parameters, and the state of each."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    return isinstance(groups, (list, tuple)) and all(isinstance(g, Mapping) and "params" in g for g in groups)


def check_resumable(optimizer: Any, further: Iterable[Any]) -> None:
    """Check, at the first save, that an optimizer which is not as torch's are can be resumed.

    One with a layout of its own, or with another optimizer in it, loads what it has saved, which must change nothing.

    Args:
        optimizer: The optimizer.
        further: Objects whose state is saved besides.

    Raises:
        CheckpointError: It would not come back as it is.
    """
    state, held, name = freeze(optimizer.state_dict()), held_by(optimizer), type(optimizer).__name__
    if not held and is_of_torch(state):
        return
    if lost := _lost(held, tensors_in([state, *(one.state_dict() for one in further)])):
        raise CheckpointError(
            f"{name} holds optimizers whose state is not in what its state_dict returns ({', '.join(lost)}): a resumed "
            "run would begin with none. Give what has it in `states`, or use an optimizer that saves all it has (not "
            "a layer-wise one)"
        )
    check_readable(OPTIMIZER_NAME, state)
    before = _copy(state)
    memory = OptimizerMemory([optimizer, *held])
    try:
        optimizer.load_state_dict(_copy(before))
    except Exception as error:
        raise CheckpointError(
            f"{name} does not load what its own state_dict returns ({type(error).__name__}: {error}): no checkpoint of "
            "it could be resumed from. Use another optimizer, or repair its load_state_dict"
        ) from error
    memory.put_back()
    if path := _difference(before, optimizer.state_dict(), "state_dict()"):
        raise CheckpointError(
            f"{name} comes back changed when it loads what its own state_dict returns ({path}): a resumed run would "
            "differ. Use another optimizer, or repair its load_state_dict"
        )


def _copy(state: Any) -> Any:
    return replaced(state, lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf)


def _lost(held: Iterable[torch.optim.Optimizer], saved: list[torch.Tensor]) -> list[str]:
    """Return the classes of the optimizers that have tensors in their state which nothing of `saved` is."""
    known = set(map(id, saved))

    def is_lost(tensor: torch.Tensor) -> bool:
        # A state dict may have copies.
        return id(tensor) not in known and not any(_is_same(tensor, one) for one in saved)

    return sorted({type(one).__name__ for one in held if any(map(is_lost, tensors_in(list(one.state.values()))))})


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    one, other = one.detach().cpu(), other.detach().cpu()
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _difference(one: Any, other: Any, path: str) -> str:
    """Return the path of the first part in which two trees differ; empty if they do not."""
    if isinstance(one, torch.Tensor):
        return "" if isinstance(other, torch.Tensor) and _is_same(one, other) else path
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return path
        return next(filter(None, (_difference(one[key], other[key], f"{path}[{key!r}]") for key in one)), "")
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return path
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (_difference(*pair, f"{path}[{number}]") for number, pair in pairs)), "")
    # NaN differs from itself.
    return "" if one is other or one == other or (one != one and other != other) else path
