"""The callbacks' `on_save`, called once a checkpoint is committed instead of when its commit begins."""

from __future__ import annotations

import copy
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from checkpointing.process import rng


class CommitNotices:
    """Holds back `on_save` of a trainer's callbacks until all ranks know that the checkpoint is committed."""

    def __init__(self, trainer: Any) -> None:
        """Take the place of the callback handler's `on_save`.

        Args:
            trainer: Its `control` is what callbacks are called with, and may replace. `_manager` is asked for commits.
        """
        self._trainer, self._handler = trainer, trainer.callback_handler
        self._notify_now = self._handler.on_save
        self._waiting: list[tuple[int, TrainerState]] = []
        self._handler.on_save = self._on_save

    def _on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> TrainerControl:
        # As the handler does now; doing it later could take back a newer request.
        control.should_save = False
        then = copy.copy(state)
        then.log_history = list(state.log_history)
        self._waiting.append((state.global_step, then))
        self._await_oldest()
        for callback in self._handler.callbacks:
            if hasattr(callback, "on_checkpoint_staged"):
                callback.on_checkpoint_staged(args, state, control)
        return control

    def notify(self, *, committed: bool) -> None:
        """Settle the oldest save: it is committed, or never will be. All ranks call this at the same step."""
        if not self._waiting:
            return
        _, state = self._waiting.pop(0)
        self._await_oldest()
        if committed:
            trainer = self._trainer
            wanted = trainer.control.should_save
            # Which step this is depends on the storage: what a callback draws must not change what training draws.
            generators = rng.state(trainer._manager.world_size)
            trainer.control = self._notify_now(trainer.args, state, trainer.control) or trainer.control
            rng.set_state(generators)
            trainer.control.should_save |= wanted

    def notify_all(self) -> None:
        """Settle all saves: no commit is in flight any more."""
        while self._waiting:
            self.notify(committed=self._trainer._manager.restoring.is_committed(self._waiting[0][0]))

    def forget(self) -> None:
        """Drop saves of an earlier training."""
        self._waiting.clear()

    def _await_oldest(self) -> None:
        self._trainer._manager.awaited = self._waiting[0][0] if self._waiting else None
