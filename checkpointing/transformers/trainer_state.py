"""`trainer_state.json`: written as the Trainer does, and checked before the Trainer reads it."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections.abc import Callable

from transformers import TrainerState

from checkpointing.files.loaded_checkpoint import LoadedCheckpoint

TRAINER_STATE_NAME = "trainer_state.json"


def checked_directory(point: LoadedCheckpoint) -> str:
    """Check what the Trainer reads without checks; return the directory to read it from.

    Raises:
        InvalidCheckpoint: `trainer_state.json` is missing or cannot be parsed.
    """
    state = point.json(TRAINER_STATE_NAME)
    with point.reading(TRAINER_STATE_NAME):
        read = TrainerState(**state)
        if not is_number(read.global_step) or read.global_step != point.step:
            raise ValueError(f"it is of step {read.global_step}")
        numbers = [read.epoch, read.best_metric, read.total_flos, read.num_input_tokens_seen]
        if not all(number is None or is_number(number) for number in numbers):
            raise ValueError("epoch, best_metric, total_flos or num_input_tokens_seen is not a number")
        if not isinstance(read.best_model_checkpoint, str | None):
            raise ValueError("best_model_checkpoint is not a path")
        if not isinstance(read.log_history, list) or not all(isinstance(entry, dict) for entry in read.log_history):
            raise ValueError("log_history is not a list of objects")
        if not isinstance(read.stateful_callbacks, dict):
            raise ValueError("stateful_callbacks is not an object")
    return str(point.directory)


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float that `float` accepts."""
    if isinstance(value, float):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def state_bytes(state: TrainerState) -> bytes:
    """Return `trainer_state.json` as the Trainer writes it."""
    return (json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n").encode()


def state_file(state: TrainerState) -> Callable[[], bytes]:
    """Copy the present state; return a function that writes it out while training continues."""
    taken = copy.copy(state)
    # The Trainer's own file is always that of rank 0; here it is of the first rank of the node that leads.
    taken.is_local_process_zero = taken.is_world_process_zero = True
    # The history only grows at its end: a new list of the same entries is enough.
    taken.log_history = list(state.log_history)
    taken.stateful_callbacks = copy.deepcopy(state.stateful_callbacks)
    return lambda: state_bytes(taken)


def evaluated_metrics(state: TrainerState) -> dict[str, float]:
    """Return what was evaluated at the present step."""
    entries = [entry for entry in state.log_history[-3:] if entry.get("step") == state.global_step]
    values = {name: value for entry in entries for name, value in entry.items() if name.startswith("eval_")}
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
