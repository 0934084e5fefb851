"""The callback by which a resilient trainer follows the Trainer's loop."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from checkpointing.manager.manager import CheckpointManager
from checkpointing.transformers.commit_notices import CommitNotices
from checkpointing.transformers.options import ResilientOptions
from checkpointing.transformers.train_call import TrainCall


class ResilientTrainer(Protocol):
    """What the callback needs of the trainer."""

    model: torch.nn.Module
    is_in_train: bool
    _manager: CheckpointManager
    _session: TrainCall
    _notices: CommitNotices
    _options: ResilientOptions

    def _on_train_begin(self) -> None: ...

    def _on_train_end(self) -> None: ...


class StepCallback(TrainerCallback):
    """Heartbeats, the agreement of all ranks at each step, and reports to a supervisor."""

    def __init__(self, trainer: ResilientTrainer) -> None:
        """Follow a trainer; its session and manager change with each call of `train`."""
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin training, once the model is where it is trained."""
        self._trainer._on_train_begin()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report that a step begins."""
        self._trainer._manager.begin_step()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the gradients where the Trainer, which then does not clip them, does not."""
        if not args.max_grad_norm:
            self._trainer._session.guard.measure_norm(self._trainer.model.parameters())

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record the end of the epoch: what follows it is not a step."""
        cursor = self._trainer._session.data.cursor
        if cursor is not None:
            cursor.end_epoch()
        self._trainer._manager.pause()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Cut an evaluation short where all ranks have agreed to stop."""
        if self._trainer.is_in_train:
            self._trainer._session.evaluation.step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Agree with all ranks on what is due."""
        trainer, session = self._trainer, self._trainer._session
        due = session.due = trainer._manager.end_of_step(state.global_step)
        if due.committed or due.not_committed:
            trainer._notices.notify(committed=due.committed)
        if due.stop:
            session.stopping = True
            control.should_training_stop = True
        if due.stop or due.save or (trainer._options.saves_by_price and state.global_step >= state.max_steps):
            control.should_save = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report what was logged to a supervisor."""
        trainer = self._trainer
        if logs and trainer.is_in_train:
            speed = trainer._session.throughput.between_entries(logs)
            trainer._manager.report(state.global_step, {**speed, **logs})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End training."""
        self._trainer._on_train_end()
