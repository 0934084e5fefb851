"""What training changes besides the model: what TRL's trainers and callbacks keep, and what no checkpoint holds."""

from __future__ import annotations

import dataclasses
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from transformers.trainer_callback import ExportableState, TrainerControl

from checkpointing.process.reachable import is_own_module, settings_of
from checkpointing.state.train_state import hook_states

# TRL's online trainers count by these in what they have generated, and add these up between two log entries.
_STEPS = ("_step", "_buffer_step")
_FIGURES = ("_loss_total", "_step_equiv", "_step_eq", "matched_sum")
# Of the names under which callbacks' states are saved.
CALLBACK_PREFIX = "callback_"


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


def watched(trainer: Any) -> dict[str, object]:
    """Return the objects of a trainer in which what no checkpoint holds is looked for, by name."""
    callbacks: dict[str, object] = {}
    for callback in trainer.callback_handler.callbacks:
        name = type(callback).__name__
        same = sum(type(one) is type(callback) for one in callbacks.values())
        callbacks[f"{name}[{same}]" if same else name] = callback
    # What a script puts on the Trainer's own state is in no checkpoint.
    fields = {field.name for field in dataclasses.fields(trainer.state)}
    more = {name: value for name, value in vars(trainer.state).items() if name not in fields}
    state = {"state": types.SimpleNamespace(**more)} if more else {}
    hooks = {
        f"communication hook {number} ({type(state).__name__})": state
        for number, state in enumerate(hook_states(trainer.model_wrapped))
    }
    name = type(trainer).__name__.removeprefix("Resilient")
    return {**callbacks, **state, **hooks, **_settings(trainer), name: trainer}


# What libraries, and this one, change in such objects themselves; `save_pretrained` sets those of a configuration.
_CHANGED_SETTINGS = (
    *("per_device_train_batch_size", "train_batch_size", "output_dir", "resume_from_checkpoint", "max_steps"),
    *("architectures", "dtype", "torch_dtype"),
)


def _settings(trainer: Any) -> dict[str, object]:
    """Return what a script may change in the objects of libraries that a trainer is given, by name."""
    objects = {
        "args": getattr(trainer, "args", None),
        "data_collator": getattr(trainer, "data_collator", None),
        "label_smoother": getattr(trainer, "label_smoother", None),
        "model.config": getattr(getattr(trainer, "model", None), "config", None),
    }
    return {name: settings_of(value, _CHANGED_SETTINGS) for name, value in objects.items() if value is not None}


def exported_by_the_loop(trainer: Any) -> list[tuple[object, Any]]:
    """Return the callbacks of the script's classes that the Trainer saves, each with what is saved of it."""
    callbacks = [one for one in trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
    return [(one, one.state()) for one in callbacks if is_own_module(type(one).__module__)]


def saved_by_the_loop(trainer: Any) -> list[object]:
    """Return the objects of a trainer that are saved, or belong to its loop, of which what matters is saved."""
    exported = {id(one) for one, _ in exported_by_the_loop(trainer)}
    callbacks = [
        one
        for one in trainer.callback_handler.callbacks
        if isinstance(one, ExportableState) and id(one) not in exported
    ]
    loop = [trainer.accelerator, trainer.args, trainer.state, trainer.control, trainer.callback_handler]
    own = [trainer._manager, trainer._session, trainer._options, trainer._notices]
    wrapper = [trainer.model_wrapped] if trainer.model_wrapped is not trainer.model else []
    return [*callbacks, *loop, *own, *wrapper]
