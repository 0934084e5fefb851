"""Makes a trainer's job short for a rehearsal, and keeps it from touching what is the user's."""

from __future__ import annotations

from typing import Any

import torch
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from checkpointing.manager.rehearsal import Rehearsal

_EVALUATED_ROWS = 16


def shorten(trainer: Any, short: Rehearsal) -> None:
    """Set a trainer's arguments for a rehearsal: saves, logs and evaluations come often, and nothing is published.

    Args:
        trainer: Its data set is cut where that is simple, so that an epoch ends within the rehearsal.
        short: How short it is.
    """
    args = trainer.args
    changes: dict[str, Any] = {
        "output_dir": short.output_dir,
        "save_strategy": SaveStrategy.STEPS,
        "save_steps": short.save_steps,
        "save_total_limit": None,
        "logging_strategy": IntervalStrategy.STEPS,
        "logging_steps": 1,
        "load_best_model_at_end": False,
        "push_to_hub": False,
    }
    if args.eval_strategy != IntervalStrategy.NO:
        changes |= {"eval_strategy": IntervalStrategy.STEPS, "eval_steps": short.save_steps}
    for name, value in changes.items():
        setattr(args, name, value)
    # Of trackers, as an integration's callback would begin a run on a server.
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__module__ == "transformers.integrations.integration_utils":
            trainer.remove_callback(callback)
    samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    # An epoch and a half.
    trainer.train_dataset = _first(trainer.train_dataset, samples * (short.steps * 2 // 3))
    evaluated = trainer.eval_dataset
    if not isinstance(evaluated, dict):
        trainer.eval_dataset = _first(evaluated, _EVALUATED_ROWS * args.world_size)


def _first(data: Any, count: int) -> Any:
    """Return the first rows of a data set; all of one that is short, a stream, or of an unknown kind."""
    if isinstance(data, torch.utils.data.IterableDataset) or not hasattr(data, "__len__") or len(data) <= count:
        return data
    if hasattr(data, "select"):
        return data.select(range(count))
    return torch.utils.data.Subset(data, range(count)) if hasattr(data, "__getitem__") else data
