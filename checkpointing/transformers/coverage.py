"""State that training changes and no checkpoint holds, found by comparing digests as training begins and later.

Compared are attributes of the trainer and its callbacks: modules, tensors, generators, and of a script's own callbacks
also numbers, strings and small containers of those. This finds the common cases, not all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Set
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

from checkpointing.state.tensor_fingerprint import fingerprint
from checkpointing.state.train_state import hook_states

# Of these packages' callbacks only tensors are compared: numbers count time, progress and the like.
_KNOWN_PACKAGES = ("transformers.", "trl.", "checkpointing.", "runner.", "accelerate.", "sentence_transformers.")
# Number of a module's tensors that are compared: reading all of a large frozen one would take seconds.
_TENSORS_OF_A_MODULE = 16
_SIMPLE = (bool, int, float, str)


def uncovered(trainer: Any, covered: Set[int]) -> dict[str, str]:
    """Return digests of what could change without being saved, by name.

    Args:
        trainer: A Hugging Face trainer.
        covered: `id` of each object that is saved.
    """
    found: dict[str, str] = {}
    saved = set(covered) | {id(trainer.model), id(trainer.model_wrapped)}
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        if isinstance(callback, ExportableState) or id(callback) in saved:
            continue
        own = not (kind.__module__ + ".").startswith(_KNOWN_PACKAGES)
        for name, value in vars(callback).items():
            if id(value) not in saved and (own or _holds_tensors(value)):
                _add(found, f"{kind.__name__}.{name}", value, simple=True)
    for name, value in vars(trainer).items():
        # Private attributes are those of the Trainer's loop, and what matters of them is saved.
        if id(value) not in saved and not name.startswith("_"):
            _add(found, f"{type(trainer).__name__.removeprefix('Resilient')}.{name}", value, simple=False)
    for number, state in enumerate(hook_states(trainer.model_wrapped)):
        for name, value in vars(state).items():
            _add(found, f"communication hook {number} ({type(state).__name__}).{name}", value, simple=True)
    return found


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(part, torch.Tensor) for part in value)
    return isinstance(value, (torch.nn.Module, torch.Tensor, torch.Generator))


def changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the names of what differs, sorted."""
    return sorted(name for name in before.keys() & now.keys() if before[name] != now[name])


def _add(found: dict[str, str], name: str, value: Any, *, simple: bool) -> None:
    digest = hashlib.blake2b(digest_size=8)
    if isinstance(value, torch.nn.Module):
        state = [tensor for tensor in value.state_dict().values() if isinstance(tensor, torch.Tensor)]
        half = _TENSORS_OF_A_MODULE // 2
        _add_tensors(digest, state if len(state) <= 2 * half else [*state[:half], *state[-half:]])
    elif isinstance(value, torch.Tensor):
        _add_tensors(digest, [value])
    elif isinstance(value, torch.Generator):
        _add_tensors(digest, [value.get_state()])
    elif simple and isinstance(value, (*_SIMPLE, list, tuple, dict, set)):
        if not _add_simple(digest, value):
            return
    else:
        return
    found[name] = digest.hexdigest()


def _add_tensors(digest: Any, tensors: list[torch.Tensor]) -> None:
    flat = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel())
    digest.update(repr(fingerprint(flat).tolist()).encode())


def _add_simple(digest: Any, value: Any) -> bool:
    """Add a value to a digest; returns False if it contains something that is not compared."""
    for part in _flat(value):
        if isinstance(part, torch.Tensor):
            _add_tensors(digest, [part])
        elif isinstance(part, (*_SIMPLE, type(None))):
            digest.update(repr(part).encode() + b",")
        else:
            return False
    return True


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield key
            yield from _flat(part)
    elif isinstance(value, (list, tuple, set)):
        yield len(value)
        for part in value:
            yield from _flat(part)
    else:
        yield value
