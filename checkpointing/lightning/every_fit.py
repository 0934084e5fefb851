"""Gives every Lightning `Trainer` of a program a `ResilientCheckpoint`, without an edit of the program."""

from __future__ import annotations

import functools
from typing import Any

from lightning.pytorch import Trainer

from checkpointing.lightning.callback import ResilientCheckpoint


def protect_trainers() -> None:
    """Have `fit` give every trainer that has no `ResilientCheckpoint` one, which saves as often as it costs little."""
    plain = Trainer.fit

    @functools.wraps(plain)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(callback, ResilientCheckpoint) for callback in self.callbacks):
            self.callbacks.insert(0, ResilientCheckpoint(save_steps="auto"))
        return plain(self, *args, **kwargs)

    Trainer.fit = fit  # type: ignore[method-assign]
