"""What this callback does in the place of Lightning's own restoring."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from lightning.pytorch.core.hooks import DataHooks

logger = logging.getLogger("checkpointing")

# What Lightning calls between drawing a batch and the first hook of its step.
_BEFORE_BATCH_START = ("on_before_batch_transfer", "on_after_batch_transfer")


def replace_restoring(trainer: Any, restore: Callable[[], None]) -> None:
    """Have Lightning restore the training state by `restore`, and nothing of what `fit(ckpt_path=...)` names.

    It does so after the callbacks' `on_fit_start`, where some rebuild the optimizer's parameter groups.

    Args:
        trainer: Lightning's trainer.
        restore: Called once.
    """
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = {}
    connector.restore_training_state = restore
    # Some strategies have it called only after `on_fit_start`.
    connector.resume_start = lambda *_, **__: None


def put_restoring_back(trainer: Any) -> None:
    """Undo `replace_restoring`."""
    for name in ("restore_training_state", "resume_start"):
        vars(trainer._checkpoint_connector).pop(name, None)


def warn_of_draws(module: Any) -> None:
    """Warn of hooks of a `LightningModule` in which a batch may be changed at random."""
    found = [name for name in _BEFORE_BATCH_START if getattr(type(module), name) is not getattr(DataHooks, name)]
    if found:
        logger.warning(
            "what %s draws at random in %s is not resumed exactly: Lightning calls it for the next batch before a step "
            "is saved. Draw in the data set, the collate function or training_step",
            type(module).__name__,
            " and ".join(found),
        )
