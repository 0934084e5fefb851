"""The callback by which a resilient trainer follows the Trainer's loop, and the Trainer's `on_save`, told in time."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class EvaluationCutShort(Exception):
    """All ranks have agreed to stop in the middle of an evaluation."""


class StepCallback(TrainerCallback):
    """Heartbeats and the agreed stop."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # When how many tokens had been seen.
        self._tokens_at: tuple[float, float] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer._on_train_begin()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer._manager.begin_step()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = self._trainer
        if trainer._check_finite and not args.max_grad_norm:
            # Nobody clips them, so nobody has measured them.
            gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
            trainer._own_norm = torch.nn.utils.get_total_norm(gradients)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = self._trainer
        if trainer._cursor is not None:
            trainer._cursor.end_epoch()
        trainer._manager.pause()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = self._trainer
        if not trainer.is_in_train:
            return
        trainer._manager.pause()
        if trainer._before_evaluation is not None and trainer._manager.agree_to_stop():
            raise EvaluationCutShort

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer = self._trainer
        due = trainer._due = trainer._manager.end_of_step(state.global_step)
        if due.committed or due.not_committed:
            trainer._saves.tell(committed=due.committed)
        if due.stop:
            trainer._stopping = True
            control.should_training_stop = True
        if due.stop or due.save or (trainer._saves_by_price and state.global_step >= state.max_steps):
            control.should_save = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs and self._trainer.is_in_train:
            self._trainer._manager.report(state.global_step, {**self._speed(logs), **logs})

    def _speed(self, logs: dict[str, Any]) -> dict[str, float]:
        """Of all ranks, since the last entry. TRL counts tokens, the Trainer on request; otherwise ids are counted."""
        tokens = logs.get("num_tokens", logs.get("num_input_tokens_seen", self._trainer._num_ids or None))
        if "loss" not in logs or not isinstance(tokens, (int, float)):
            return {}
        now, before = time.monotonic(), self._tokens_at
        self._tokens_at = (now, tokens)
        # A second training starts from 0.
        if before is None or now <= before[0] or tokens < before[1]:
            return {}
        return {"tokens_per_s": round((tokens - before[1]) / (now - before[0]), 1)}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer._on_train_end()


class Saves:
    """Calls the callbacks' `on_save` once a checkpoint is committed, in place of the moment in which it is begun."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._handler = trainer, trainer.callback_handler
        self._tell_at_once = self._handler.on_save
        self._waiting: list[tuple[int, TrainerState]] = []
        self._handler.on_save = self._on_save

    def _on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> TrainerControl:
        # As the handler does; what it is asked for later must not take back a newer wish.
        control.should_save = False
        then = copy.copy(state)
        then.log_history = list(state.log_history)
        self._waiting.append((state.global_step, then))
        self._await_oldest()
        for callback in self._handler.callbacks:
            if hasattr(callback, "on_checkpoint_staged"):
                callback.on_checkpoint_staged(args, state, control)
        return control

    def tell(self, *, committed: bool) -> None:
        """The oldest save that callbacks wait for is committed, or never will be; on all ranks at the same step."""
        if not self._waiting:
            return
        _, state = self._waiting.pop(0)
        self._await_oldest()
        if committed:
            trainer = self._trainer
            wanted = trainer.control.should_save
            trainer.control = self._tell_at_once(trainer.args, state, trainer.control) or trainer.control
            trainer.control.should_save |= wanted

    def tell_all(self) -> None:
        """Nothing is on its way any more."""
        while self._waiting:
            self.tell(committed=self._trainer._manager.is_committed(self._waiting[0][0]))

    def forget(self) -> None:
        """Nothing that is awaited will come."""
        self._waiting.clear()

    def _await_oldest(self) -> None:
        self._trainer._manager.awaited = self._waiting[0][0] if self._waiting else None
