"""What callbacks do between steps, which a watchdog must not take for a step that hangs."""

from __future__ import annotations

import contextlib
from typing import Any

# `on_step_end` and those before it are parts of a step.
_BETWEEN_STEPS = {"on_log", "on_save", "on_evaluate", "on_predict", "on_push_begin"}


def outside_steps(trainer: Any) -> contextlib.AbstractContextManager[None]:
    """Note, while training, that no step runs; before and after training, do nothing."""
    if not trainer.is_in_train:
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[None] = trainer._manager.outside_steps()
    return found


def watch_callbacks(trainer: Any) -> None:
    """Have the time that callbacks take between steps not count as that of a step: trackers and uploads may be slow."""
    handler = trainer.callback_handler
    call = handler.call_event

    def call_event(event: str, *args: Any, **kwargs: Any) -> Any:
        if event == "on_epoch_end" and trainer.is_in_train:
            # Until the next epoch's first step.
            trainer._manager.pause()
        with outside_steps(trainer) if event in _BETWEEN_STEPS else contextlib.nullcontext():
            return call(event, *args, **kwargs)

    handler.call_event = call_event
