"""`trainer_state.json`: written as the Trainer does, and checked before the Trainer reads it."""

from __future__ import annotations

import dataclasses
import json
import sys

from transformers import TrainerState

from checkpointing.rank.restore_point import RestorePoint

TRAINER_STATE_NAME = "trainer_state.json"


def checked_directory(point: RestorePoint) -> str:
    """The directory that the Trainer may read from: what it will not look at itself has been.

    Raises:
        InvalidCheckpoint: there is no `trainer_state.json`, or it makes no sense.
    """
    state = point.json(TRAINER_STATE_NAME)
    with point.reading(TRAINER_STATE_NAME):
        read = TrainerState(**state)
        if not is_number(read.global_step) or read.global_step != point.step:
            raise ValueError(f"it is of step {read.global_step}")
        numbers = [read.epoch, read.best_metric, read.total_flos, read.num_input_tokens_seen]
        if not all(number is None or is_number(number) for number in numbers):
            raise ValueError("epoch, best_metric, total_flos or num_input_tokens_seen is no number")
        if not isinstance(read.best_model_checkpoint, str | None):
            raise ValueError("best_model_checkpoint is no path")
        if not isinstance(read.log_history, list) or not all(isinstance(entry, dict) for entry in read.log_history):
            raise ValueError("log_history is no list of objects")
        if not isinstance(read.stateful_callbacks, dict):
            raise ValueError("stateful_callbacks is no object")
    return str(point.directory)


def is_number(value: object) -> bool:
    """One that a float can be made of."""
    if isinstance(value, float):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def state_bytes(state: TrainerState) -> bytes:
    """`trainer_state.json` as the Trainer writes it."""
    return (json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n").encode()
