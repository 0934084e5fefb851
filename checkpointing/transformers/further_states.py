"""What training changes besides the model: what TRL's trainers and callbacks keep, and what no checkpoint holds."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from transformers.trainer_callback import ExportableState, TrainerControl

from checkpointing.state.tensor_fingerprint import fingerprint
from checkpointing.state.train_state import hook_states

# TRL's online trainers count by these in what they have generated, and add these up between two log entries.
_STEPS = ("_step", "_buffer_step")
_FIGURES = ("_loss_total", "_step_equiv", "_step_eq", "matched_sum")
# Of the names under which callbacks' states are saved.
CALLBACK_PREFIX = "callback_"
# Of these packages' callbacks only tensors are compared: numbers count time, progress and the like.
_KNOWN_PACKAGES = ("transformers.", "trl.", "checkpointing.", "runner.", "accelerate.", "sentence_transformers.")
# Number of a module's tensors that are compared: reading all of a large frozen one would take seconds.
_TENSORS_OF_A_MODULE = 16
_SIMPLE = (bool, int, float, str)


def further_states(trainer: Any) -> dict[str, Any]:
    """Return what a resilient trainer keeps, by the name that it is saved under."""
    states: dict[str, Any] = {}
    if generates_ahead(trainer):
        states["generation_buffer"] = Attributes(trainer, lambda name: name in _STEPS or name.startswith("_buffered_"))
    figures = Attributes(trainer, lambda name: name == "stats" or name.endswith(_FIGURES))
    if figures.state_dict():
        states["figures"] = figures
    counted = Counter[str]()
    for callback in trainer.callback_handler.callbacks:
        # TRL's, for reference models and teachers that follow the model.
        if any(base.__name__ == "SyncRefModelCallback" for base in type(callback).__mro__):
            states["ref_model"] = trainer.accelerator.unwrap_model(callback.ref_model)
        if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
            name = f"{CALLBACK_PREFIX}{type(callback).__name__}"
            counted[name] += 1
            # Several of a class differ by their order.
            states[f"{name}_{counted[name]}" if counted[name] > 1 else name] = callback
    if trainer._adapter is not None and (statistics := RunningStatistics(trainer.model)).state_dict():
        states["base_statistics"] = statistics
    return states


def generates_ahead(trainer: Any) -> bool:
    """Return whether a trainer generates completions for several steps, and keeps them in a buffer."""
    return hasattr(trainer, "_buffered_inputs")


class Attributes:
    """Attributes of an object, chosen by name, as an object with a state; each rank may have its own."""

    def __init__(self, owner: Any, is_wanted: Callable[[str], bool]) -> None:
        self._owner, self._is_wanted = owner, is_wanted

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes by name."""
        found = {name: value for name, value in vars(self._owner).items() if self._is_wanted(name)}
        if isinstance(found.get("stats"), dict):
            found["stats"] = {name: list(values) for name, values in found["stats"].items()}
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the attributes."""
        vars(self._owner).update(state)


class RunningStatistics:
    """What training changes in the base of an adapter, of BatchNorm, as an object with a state."""

    def __init__(self, model: Any) -> None:
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


def export_states(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return the callbacks' states by class name; those of several callbacks of one class as a list."""
    states: dict[str, list[Any]] = {}
    for callback in callbacks:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: found if len(found) > 1 else found[0] for name, found in states.items()}


def restore_states(callbacks: Iterable[Any], saved: Mapping[str, Any]) -> None:
    """Restore callbacks in place, as the script may hold them, from what `export_states` returned.

    `TrainerControl` is left out: it belongs to the loop. Something else than states raises an exception of any kind.
    """
    callbacks = list(callbacks)
    for name, found in saved.items():
        same_class = [callback for callback in callbacks if type(callback).__name__ == name]
        for callback, state in zip(same_class, found if isinstance(found, list) else [found], strict=False):
            if isinstance(callback, ExportableState) and not isinstance(callback, TrainerControl):
                for attribute, value in state.get("attributes", {}).items():
                    setattr(callback, attribute, value)


def stops_epoch(saved: Mapping[str, Any]) -> bool:
    """Return whether a callback had asked to end the epoch at the step of which `export_states` returned this."""
    control = saved.get(TrainerControl.__name__)
    return isinstance(control, Mapping) and bool(control.get("args", {}).get("should_epoch_stop"))


def uncovered(trainer: Any, covered: Set[int]) -> dict[str, str]:
    """Return digests of what could change without being saved, by name, to compare with those taken later.

    These are of attributes of the trainer and its callbacks: modules, tensors, generators, and of a script's own
    callbacks also numbers, strings and small containers of those. This finds the common cases, not all of them. What
    is saved is `covered`, by `id`.
    """
    found: dict[str, str] = {}
    saved = set(covered) | {id(trainer.model), id(trainer.model_wrapped)} | set(_saved_modules(trainer))
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


def _saved_modules(trainer: Any) -> Iterator[int]:
    """Yield the `id` of modules that have nothing but tensors of the model and parameters that the optimizer trains."""
    modules = [value for value in vars(trainer).values() if isinstance(value, torch.nn.Module)]
    if modules:
        groups = getattr(getattr(trainer, "optimizer", None), "param_groups", ())
        tensors = {id(parameter) for group in groups for parameter in group["params"]} | _tensors_of(trainer.model)
        yield from (id(module) for module in modules if _tensors_of(module) <= tensors)


def _tensors_of(module: Any) -> set[int]:
    is_module = isinstance(module, torch.nn.Module)
    return {id(value) for value in (*module.parameters(), *module.buffers())} if is_module else set()


def _add(found: dict[str, str], name: str, value: Any, *, simple: bool) -> None:
    # Two callbacks of a class have the same names.
    if (digest := _digest(value, simple=simple)) is not None:
        found[name] = digest


def changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the names of what differs, sorted."""
    return sorted(name for name in before.keys() & now.keys() if before[name] != now[name])


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(part, torch.Tensor) for part in value)
    return isinstance(value, (torch.nn.Module, torch.Tensor, torch.Generator))


def _digest(value: Any, *, simple: bool) -> str | None:
    """Return the digest of an attribute; None if it is, or contains, something that is not compared."""
    parts: Iterable[Any]
    if isinstance(value, torch.nn.Module):
        state = [tensor for tensor in value.state_dict().values() if isinstance(tensor, torch.Tensor)]
        half = _TENSORS_OF_A_MODULE // 2
        parts = state if len(state) <= 2 * half else [*state[:half], *state[-half:]]
    elif isinstance(value, torch.Generator):
        parts = [value.get_state()]
    elif isinstance(value, torch.Tensor) or (simple and isinstance(value, (*_SIMPLE, list, tuple, dict, set))):
        parts = _flat(value)
    else:
        return None
    digest = hashlib.blake2b(digest_size=8)
    # One after the other: a container may be large, or hold itself behind what is not compared.
    for part in parts:
        if isinstance(part, torch.Tensor):
            flat = [part.detach().contiguous().reshape(-1).view(torch.uint8)] if part.numel() else []
            digest.update(repr(fingerprint(flat).tolist()).encode())
        elif isinstance(part, (*_SIMPLE, type(None))):
            digest.update(repr(part).encode() + b",")
        else:
            return None
    return digest.hexdigest()


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
