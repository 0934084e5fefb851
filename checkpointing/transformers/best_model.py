"""`load_best_model_at_end` by this library's checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def best_model_at_end(
    args: Any, state: Any, load: Callable[[int], int | None], folder_of: Callable[[int], str], *, stopping: bool
) -> Iterator[None]:
    """Load the best model, and keep the Trainer from looking for folders of its own, some of which it would remove.

    Args:
        args: The trainer's `TrainingArguments`.
        state: Its `TrainerState`; its `best_model_checkpoint` is set at the end.
        load: Loads the weights of a step; returns the step whose weights the model has then.
        folder_of: Returns the location of a step's checkpoint.
        stopping: Training stops on request and is resumed later: nothing is loaded.
    """
    if not args.load_best_model_at_end:
        yield
        return
    best = state.best_global_step if not stopping else None
    args.load_best_model_at_end = False
    # It may be that of a stock Trainer's checkpoint that this run has started from.
    state.best_model_checkpoint = None
    try:
        if best:
            best = load(best)
        yield
    finally:
        args.load_best_model_at_end = True
        if best:
            state.best_model_checkpoint = folder_of(best)
