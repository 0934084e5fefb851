"""What TRL's trainers and the callbacks keep besides the model, as objects with `state_dict` and `load_state_dict`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerControl

# TRL's online trainers count by these in what they have generated, and add these up between two log entries.
_STEPS = ("_step", "_buffer_step")
_FIGURES = ("_loss_total", "_step_equiv", "_step_eq", "matched_sum")
# Of the names under which callbacks' states are saved.
CALLBACK_PREFIX = "callback_"


def further_states(trainer: Any) -> dict[str, Any]:
    """Return the objects by the name that they are saved under."""
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
    return states


def generates_ahead(trainer: Any) -> bool:
    """Return whether a trainer generates completions for several steps, and keeps them in a buffer."""
    return hasattr(trainer, "_buffered_inputs")


class Attributes:
    """Attributes of an object as an object with a state; each rank may have its own."""

    def __init__(self, owner: Any, is_wanted: Callable[[str], bool]) -> None:
        """Choose attributes of `owner` by name."""
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


def export_states(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return the callbacks' states by class name; those of several callbacks of one class as a list."""
    states: dict[str, list[Any]] = {}
    for callback in callbacks:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: found if len(found) > 1 else found[0] for name, found in states.items()}


def restore_states(callbacks: Iterable[Any], saved: Mapping[str, Any]) -> None:
    """Restore callbacks in place, as the script may hold them.

    Args:
        callbacks: The trainer's.
        saved: What `export_states` returned. `TrainerControl` is left out: it belongs to the loop.

    Raises:
        Exception: Of any kind, if `saved` is something else.
    """
    callbacks = list(callbacks)
    for name, found in saved.items():
        same_class = [callback for callback in callbacks if type(callback).__name__ == name]
        for callback, state in zip(same_class, found if isinstance(found, list) else [found], strict=False):
            if isinstance(callback, ExportableState) and not isinstance(callback, TrainerControl):
                for attribute, value in state.get("attributes", {}).items():
                    setattr(callback, attribute, value)


def stops_epoch(saved: Mapping[str, Any]) -> bool:
    """Return whether a callback had asked to end the epoch at the saved step.

    Args:
        saved: What `export_states` returned.
    """
    control = saved.get(TrainerControl.__name__)
    return isinstance(control, Mapping) and bool(control.get("args", {}).get("should_epoch_stop"))
