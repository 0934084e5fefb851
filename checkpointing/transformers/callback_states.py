"""States of the Trainer's `ExportableState` callbacks: written as the Trainer does, and restored in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerControl


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
