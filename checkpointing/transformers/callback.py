"""How a resilient trainer follows the Trainer's loop: by a callback, and by what other callbacks are called with."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from checkpointing.host.failpoints import failpoint
from checkpointing.manager.manager import CheckpointManager
from checkpointing.process import rng
from checkpointing.transformers.hub import HubPushes
from checkpointing.transformers.wrapped_models import configuration_files

# Events between steps; `on_step_end` and those before it are parts of a step.
_BETWEEN_STEPS = {"on_log", "on_save", "on_evaluate", "on_predict", "on_push_begin"}


class StepCallback(TrainerCallback):
    """Heartbeats, the agreement of all ranks at each step, and reports to a supervisor."""

    def __init__(self, trainer: Any) -> None:
        """Follow a resilient trainer; its session and manager change with each call of `train`."""
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin training, once the model is where it is trained."""
        self._trainer._on_train_begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report that a step begins."""
        self._trainer._manager.begin_step()

    def on_pre_optimizer_step(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the gradients where the Trainer, which then does not clip them, does not."""
        if not args.max_grad_norm:
            self._trainer._session.guard.measure_norm(self._trainer.model.parameters())

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the end of the epoch: what follows it is not a step."""
        failpoint("training.epoch")
        session = self._trainer._session
        session.epoch_is_over = True
        if session.data.cursor is not None:
            session.data.cursor.end_epoch()
        self._trainer._manager.pause()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Cut an evaluation short where all ranks have agreed to stop."""
        if self._trainer.is_in_train:
            failpoint("training.evaluation")
            self._trainer._session.evaluation.step()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Agree with all ranks on what is due."""
        trainer, session = self._trainer, self._trainer._session
        due = session.due = trainer._manager.end_of_step(state.global_step)
        session.epoch_is_over = False
        if due.committed or due.not_committed:
            trainer._notices.notify(committed=due.committed)
        if due.stop:
            session.stopping = True
            control.should_training_stop = True
        if due.stop or due.save or (trainer._options.saves_by_price and state.global_step >= state.max_steps):
            control.should_save = True

    def on_log(
        self, args: TrainingArguments, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Report what was logged to a supervisor."""
        trainer = self._trainer
        if logs and trainer.is_in_train:
            speed = trainer._session.throughput.between_entries(logs)
            metric = args.metric_for_best_model
            # The Trainer completes the name in the same way.
            best_by = metric if metric is None or metric.startswith("eval_") else f"eval_{metric}"
            trainer._manager.report(
                state.global_step, {**speed, **logs}, best_by=best_by, higher_is_better=args.greater_is_better
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End training."""
        self._trainer._on_train_end()


class Throughput:
    """Counts token ids, and computes the rate between two log entries, as if all ranks had as many as this one."""

    def __init__(self, num_ranks: int = 1) -> None:
        # Data parallel ones.
        self._num_ranks = num_ranks
        # Ids that all ranks have computed, padding included.
        self._num_ids = 0
        self._last: tuple[float, float] | None = None

    def count(self, inputs: Any) -> None:
        """Count the ids of a micro-batch."""
        ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
        if isinstance(ids, torch.Tensor):
            self._num_ids += ids.numel() * self._num_ranks

    def between_entries(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Return `tokens_per_s` since the last log entry with a loss; empty if it is not known.

        TRL counts tokens, and so does the Trainer on request; their count, without padding, takes precedence.
        """
        tokens = logs.get("num_tokens", logs.get("num_input_tokens_seen", self._num_ids or None))
        if "loss" not in logs or not isinstance(tokens, (int, float)):
            return {}
        now, last = time.monotonic(), self._last
        self._last = (now, tokens)
        if last is None or now <= last[0] or tokens < last[1]:
            return {}
        return {"tokens_per_s": round((tokens - last[1]) / (now - last[0]), 1)}


class EvaluationCutShort(Exception):
    """All ranks have agreed to stop in the middle of an evaluation."""


class InterruptibleEvaluation:
    """An evaluation that all ranks can agree to cut short, so that a stop need not wait for its end."""

    def __init__(self, manager: CheckpointManager, world_size: int) -> None:
        self._manager, self._world_size = manager, world_size
        # States of generators when the present evaluation began; None if none runs that may be cut short.
        self.before: dict[str, Any] | None = None
        # States after an evaluation that was repeated, until the training loop sets them again.
        self.after: dict[str, Any] | None = None

    def begin(self, *, can_be_repeated: bool) -> None:
        """Begin an evaluation, which is cut short only where a resumed run would know that it is due."""
        self._manager.pause()
        if can_be_repeated:
            self.before = rng.state(self._world_size)

    def step(self) -> None:
        """Evaluate a batch; called by every rank. Raises EvaluationCutShort once all ranks have agreed to stop."""
        self._manager.pause()
        if self.before is not None and self._manager.agree_to_stop():
            raise EvaluationCutShort

    def end(self) -> None:
        """End the evaluation, if one runs."""
        self.before = None

    def was_repeated(self) -> None:
        """Keep the generators' states: the Trainer sets them again once the first batch is drawn."""
        self.after = rng.state(self._world_size)


class CommitNotices:
    """Holds back the callbacks' `on_save`, called as a commit begins, and uploads until all ranks know of its end."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._handler = trainer, trainer.callback_handler
        self._notify_now = self._handler.on_save
        self._pushes = HubPushes(trainer)
        self._waiting: list[TrainerState] = []
        self._handler.on_save = self._on_save

    def _on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> TrainerControl:
        # As the handler does now; doing it later could take back a newer request.
        control.should_save = False
        then = copy.copy(state)
        then.log_history = list(state.log_history)
        self._waiting.append(then)
        self._await_oldest()
        for callback in self._handler.callbacks:
            if hasattr(callback, "on_checkpoint_staged"):
                callback.on_checkpoint_staged(args, state, control)
        return control

    def notify(self, *, committed: bool) -> None:
        """Settle the oldest save: it is committed, or never will be. All ranks call this at the same step."""
        if not self._waiting:
            return
        state = self._waiting.pop(0)
        self._await_oldest()
        if committed:
            trainer = self._trainer
            wanted = trainer.control.should_save
            # Which step this is depends on the storage: what a callback draws must not change what training draws.
            generators = rng.state(trainer._manager.world_size)
            trainer.control = self._notify_now(trainer.args, state, trainer.control) or trainer.control
            self._pushes.push(state)
            rng.set_state(generators)
            trainer.control.should_save |= wanted

    def resumed(self, state: TrainerState) -> None:
        """Push what training has resumed from, if it is committed: its upload may have ended with the process before.

        What the Hub has already makes no commit there.
        """
        trainer = self._trainer
        if not self._pushes.are_wanted or not trainer._manager.restoring.is_committed(state.global_step):
            return
        if not trainer._manager.static_files:
            trainer._manager.static_files = configuration_files(trainer)
        generators = rng.state(trainer._manager.world_size)
        self._pushes.push(copy.copy(state))
        rng.set_state(generators)

    def notify_all(self) -> None:
        """Settle all saves: no commit is in flight any more."""
        while self._waiting:
            self.notify(committed=self._trainer._manager.restoring.is_committed(self._waiting[0].global_step))

    def forget(self) -> None:
        """Drop saves of an earlier training."""
        self._waiting.clear()

    def _await_oldest(self) -> None:
        self._trainer._manager.awaited = self._waiting[0].global_step if self._waiting else None


def remove_jit_checkpoints(trainer: Any) -> None:
    """Remove what `enable_jit_checkpoint` does at SIGTERM: it would save in the middle of a step, and end."""
    callback = trainer.pop_callback(JITCheckpointCallback)
    if callback is not None:
        # It puts the handler back that was there before.
        callback.on_train_end(trainer.args, trainer.state, trainer.control)


def outside_steps(trainer: Any) -> contextlib.AbstractContextManager[None]:
    """Note, while training, that no step runs; before and after training, do nothing."""
    if not trainer.is_in_train:
        return contextlib.nullcontext()
    manager: CheckpointManager = trainer._manager
    return manager.outside_steps()


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
