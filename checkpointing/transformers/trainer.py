"""Overrides of a trainer's loop: a thin layer over the package's other modules."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from checkpointing.data.dealing import StepLayout
from checkpointing.data.stream import beginning_of, is_seekable
from checkpointing.errors import CheckpointError, CommitFailed
from checkpointing.host.environment import rank_settings
from checkpointing.host.failpoints import failpoint
from checkpointing.manager.manager import CheckpointManager, skipped_steps
from checkpointing.manager.rehearsal import ends_rehearsal, rehearsal
from checkpointing.manager.spikes import SkippedSteps
from checkpointing.manager.step_protocol import Due
from checkpointing.transformers.callback import CommitNotices, EvaluationCutShort, StepCallback, watch_callbacks
from checkpointing.transformers.data import skipping_by_position
from checkpointing.transformers.exact import ExactMixin
from checkpointing.transformers.further_states import (
    CALLBACK_PREFIX,
    exported_by_the_loop,
    generates_ahead,
    saved_by_the_loop,
    stops_epoch,
    watched,
)
from checkpointing.transformers.job_shape import DataRanks, batch_shape, cut_micro_batches, job_of, lone_copies
from checkpointing.transformers.loop_state import LoopState
from checkpointing.transformers.saving import SavingMixin
from checkpointing.transformers.short import shorten
from checkpointing.transformers.trackers import continue_trackers, drop_repeated_lines
from checkpointing.transformers.train_call import ResilientOptions, Start, TrainCall, choose_start
from checkpointing.transformers.wrapped_models import adapter_of, advance_schedule, skips_bad_steps

logger = logging.getLogger("checkpointing")


class ResilientMixin(ExactMixin, SavingMixin):
    """Trains as the trainer's own class does, from the newest checkpoint on."""

    _train_batch_size: int  # the Trainer's own
    _make_manager: Callable[[], CheckpointManager]
    # State of a seekable stream where an epoch begins.
    _beginning: dict[str, Any] | None
    _skipped: SkippedSteps

    def _become_resilient(self, make_manager: Callable[[], CheckpointManager], options: ResilientOptions) -> None:
        """Set up what the overrides need, once `resilient` has put them in front of the trainer's class."""
        if (short := rehearsal()) is not None:
            shorten(self, short)
        args = self.args
        layout = StepLayout(DataRanks.of(self).planned, args.train_batch_size, args.gradient_accumulation_steps)
        if options.divisor > 1 and generates_ahead(self):
            raise CheckpointError(
                f"{type(self).__name__} ran out of memory, and its micro-batches cannot be halved: their samples are "
                "groups of one prompt. Choose a smaller per_device_train_batch_size or steps_per_generation"
            )
        cut_micro_batches(args, options.divisor)
        self._train_batch_size = args.train_batch_size
        self._make_manager, self._manager = make_manager, make_manager()
        self._options, self._adapter = options, adapter_of(self.model)
        if options.seekable_stream and not is_seekable(self.train_dataset):
            raise ValueError(
                "resilient(seekable_stream=True) is for an IterableDataset with state_dict and load_state_dict; "
                f"train_dataset is {type(self.train_dataset).__name__}"
            )
        self._beginning = beginning_of(self.train_dataset) if options.seekable_stream else None
        self._skipped = skipped_steps()
        self._notices = CommitNotices(self)
        watch_callbacks(self)
        self._session = TrainCall.of(self, layout)
        self.add_callback(StepCallback(self))

    # -- the beginning and the end of training -------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train as `Trainer.train` does, from the newest checkpoint of this run.

        Called again after training has ended, it is another stage with checkpoints of its own. `resume_from_checkpoint`
        says where to start while this run has no checkpoint.
        """
        if self._manager.is_closed:
            self._manager = self._make_manager()
        self._notices.forget()
        session = self._session = TrainCall.of(self, self._session.data.layout)
        self._track()
        # As the script passes the data: trainers may drop rows when training begins.
        session.job = job_of(type(self), self.train_dataset)
        restoring = self._manager.restoring
        session.start = start = choose_start(restoring, self.args, resume_from_checkpoint, rank_settings().lineage)
        if start.point is None and not start.folder:
            restoring.load_initial_weights()
        self._begin_exact(session, start)
        self._fit_job(start)
        # An attempt that begins from the beginning repeats what an earlier one of this run has logged.
        is_repeated = start.point is not None or (rank_settings().attempt > 1 and start.folder is None)
        if is_repeated and self.args.process_index == 0:
            drop_repeated_lines(self.args.output_dir, start.step)
        session.has_trackers = continue_trackers(self.callback_handler.callbacks, start.run_name)
        restoring.check_way(start.step)
        evaluates_first = self.args.eval_on_start
        # A resumed run has done it before: the figures are in the history.
        self.args.eval_on_start = evaluates_first and start.point is None
        try:
            return super().train(resume_from_checkpoint=start.folder, **kwargs)
        except Exception:
            # The program may answer it, as a search for parameters does with a trial that is out of memory.
            self._manager.leave_training()
            raise
        finally:
            self.args.eval_on_start = evaluates_first
            if start.point is not None:
                start.point.close()

    def _fit_job(self, start: Start) -> None:
        """Compare the job with a checkpoint's; keep the samples per step if the number of ranks has changed."""
        session = self._session
        if start.point is None or start.point.step == 0 or start.record is None:
            layout = session.data.fit(self._train_batch_size)
        else:
            layout = session.data.resume(start.point, start.record, session.job, self._train_batch_size)
        if layout is not None:
            self.args.per_device_train_batch_size = layout.batch_size // max(self.args.n_gpu, 1)
            self.args.gradient_accumulation_steps = layout.accumulation
            self._train_batch_size = layout.batch_size

    def _on_train_begin(self) -> None:
        """Begin training, once the Trainer has prepared model and optimizer."""
        manager, session, step = self._manager, self._session, self.state.global_step
        self._track()
        if session.start.point is not None:
            # Callbacks may have reset themselves in on_train_begin.
            names = {name for name in self._further_states() if name.startswith(CALLBACK_PREFIX)}
            manager.restoring.restore_states(session.start.point, names)
        notice = session.start.finished_notice(self.state.max_steps, session.job)
        if notice is not None and self.args.process_index == 0:
            print(f"checkpointing: {notice}", file=sys.stderr, flush=True)
        manager.announce_batch(batch_shape(self, session.data.shared_samples))
        if (copies := lone_copies(self)) > 1 and manager.rank == 0:
            logger.warning(
                "each of the %d ranks trains by itself, on the same samples: transformers has not distributed the "
                "training. On a CPU it does so with TrainingArguments(use_cpu=True) only; or start one rank "
                "(--nproc-per-node 1)",
                copies,
            )
        # What a script replaces them by is in no checkpoint.
        begun = [self.optimizer, self.lr_scheduler]
        manager.script.is_in_trainer = True
        manager.script.roots = lambda: watched(self)
        manager.script.saved = lambda: [*saved_by_the_loop(self), *begun]
        manager.script.exported = lambda: exported_by_the_loop(self)
        manager.begin(step, self.state.max_steps)
        session.figures.loss_since = session.recorded_step = step
        if step:
            self._notices.resumed(self.state)

    def _on_train_end(self) -> None:
        self._manager.finished = not self._session.stopping and self.state.global_step >= self.state.max_steps
        self._manager.close()
        self._notices.notify_all()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Report the mean loss of the run instead of the last process; load the best model of our checkpoints."""
        self._session.is_finalizing = True
        try:
            with self._best_model_at_end():
                output = super()._finalize_training(*args, **kwargs)
        finally:
            self._session.is_finalizing = False
        return output._replace(training_loss=self._mean_loss())

    @contextlib.contextmanager
    def _best_model_at_end(self) -> Iterator[None]:
        """Load the best model, and keep the Trainer from looking for folders of its own, and from removing some."""
        args, state = self.args, self.state
        if not args.load_best_model_at_end:
            yield
            return
        # A run that stops on request is resumed later.
        best = state.best_global_step if not self._session.stopping else None
        args.load_best_model_at_end = False
        # It may be that of a stock Trainer's checkpoint that this run has started from.
        state.best_model_checkpoint = None
        try:
            if best:
                best = self._load_best_of(best)
            yield
        finally:
            args.load_best_model_at_end = True
            if best:
                state.best_model_checkpoint = self._manager.restoring.folder_of(best)

    def _load_best_of(self, step: int) -> int | None:
        """Load the weights of a step, or of the next best one that can be read; return which."""
        try:
            self._manager.wait_for_commit()
        except CommitFailed as error:
            logger.warning("the last checkpoint was not committed (%s); the best earlier one is loaded", error)
        self._track()
        return self._manager.load_best(self.state.global_step, together=True, preferred=step)

    def _mean_loss(self) -> float:
        return self._session.figures.mean_loss(self._total_loss_scalar, self.state.global_step)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log, with the mean loss of the whole run at its end."""
        if self._session.is_finalizing and "train_loss" in logs:
            logs["train_loss"] = self._mean_loss()
        super().log(logs, *args, **kwargs)

    # -- data: the trainer's own order, and the position in it ---------------------------------------------------

    def get_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's own loader, whose position is followed, or that of a seekable stream."""
        data, point = self._session.data, self._session.start.point
        data.forget_loader()
        if not data.is_stream:
            return data.follow(super().get_train_dataloader(*args, **kwargs), self._train_batch_size, point)
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        return data.read_stream(self.train_dataset, collate, self._train_batch_size, point)

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        by_steps: tuple[int, int] = super()._init_training_state(max_steps, num_update_steps_per_epoch, *args, **kwargs)
        session = self._session
        return session.data.resume_position(session.start.point, by_steps, num_update_steps_per_epoch)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        session, state = self._session, self.state
        point, cursor = session.start.pending, session.data.cursor
        if cursor is not None:
            cursor.begin_epoch(kwargs["epoch"])
        steps, in_epoch = kwargs["steps_trained_in_current_epoch"], kwargs["steps_in_epoch"]
        over = state.global_step >= state.max_steps or session.start.had_ended
        has_ended = over or steps >= in_epoch or (point is not None and stops_epoch(state.stateful_callbacks))
        if point is not None and cursor is not None and steps and has_ended:
            # Only the end of the epoch is left, with what is evaluated, logged and saved there.
            cursor.skip_epoch()
            self._manager.restoring.restore_rng(point)
            self._begin_resumed()
            kwargs["num_update_steps_per_epoch"] = 0
        elif over:
            # Resumed from the very last step: the Trainer would run one more before it looks.
            self.control.should_training_stop = True
            return
        if over:
            self.control.should_training_stop = True
        with skipping_by_position():
            super()._run_epoch(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """Draw the batches of a step."""
        self._begin_resumed()
        data = self._session.data
        with data.drawing():
            batches, count = super().get_batch_samples(data.timed(data.weighed(epoch_iterator)), *args, **kwargs)
        data.consume(len(batches))
        return batches, count

    def _begin_resumed(self) -> None:
        """Restore the loop, once, before the first batch of a resumed run is drawn."""
        session = self._session
        point, session.start.pending = session.start.pending, None
        if point is None:
            return
        loop = LoopState.read(point, self.args.process_index, self.args.world_size)
        if loop is not None:
            loop.restore(self)
            session.figures = loop.figures
            session.guard.restore_losses(loop.recent_losses or ())
        repeats_evaluation = loop is not None and loop.evaluation_due
        if repeats_evaluation or session.data.stream is not None:
            self._manager.restoring.restore_rng(point)
        if repeats_evaluation:
            self.control.should_evaluate = True
            self._maybe_log_save_evaluate(self._tr_loss, None, self.model_wrapped, None, self.state.epoch, None, 0.0)
            session.evaluation.was_repeated()

    # -- steps ---------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on a micro-batch, or stand in for one of a skipped step."""
        session, step = self._session, self.state.global_step
        if step + 1 in self._skipped:
            # Without gradients the optimizer changes nothing.
            skipped = session.skipped_loss.of_step(self)
            advance_schedule(self)
            return self._share_of(skipped)
        session.throughput.count(inputs)
        self._manager.proving.batch(inputs)
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        self._manager.proving.loss(loss)
        session.guard.add_loss(loss)
        return loss

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss; a failpoint makes it NaN."""
        result = super().compute_loss(*args, **kwargs)
        if self.model.training and failpoint("training.loss"):
            return (result[0] * math.nan, *result[1:]) if isinstance(result, tuple) else result * math.nan
        return result

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, *args: Any, learning_rate: Any = None, **kwargs: Any
    ) -> None:
        session, control, step = self._session, self.control, self.state.global_step
        figures = session.figures
        figures.update(grad_norm, learning_rate)
        # An evaluation may lead to a save; and it waits for the device anyway.
        is_kept = control.should_save or control.should_evaluate or session.due.snapshot or step >= self.state.max_steps
        has_scaler = skips_bad_steps(self)
        was_applied = not (has_scaler and self.accelerator.optimizer_step_was_skipped)
        session.guard.judge(step, figures.grad_norm, is_kept=is_kept, has_scaler=has_scaler, was_applied=was_applied)
        if step != session.recorded_step:
            # Called again at an epoch's end.
            session.recorded_step = step
            self._manager.record_step(step, {"grad_norm": grad_norm}, session.due)
        if self._is_ended_by_a_stop():
            session.stopping = control.should_save = True
        if control.should_evaluate:
            # The position in the data is known, and this step is not saved yet.
            session.evaluation.begin(can_be_repeated=session.data.is_followed and self._manager.wants(step))
        try:
            super()._maybe_log_save_evaluate(
                tr_loss, figures.grad_norm, *args, learning_rate=figures.learning_rate, **kwargs
            )
        except EvaluationCutShort:
            session.stopping = True
            self.control.should_evaluate = self.control.should_save = False
            self._snapshot(commit=True)
        finally:
            session.evaluation.end()
        # After logging and evaluation, as a save would be: what they change belongs to this step.
        due, session.due = session.due, Due()
        if due.snapshot:
            self._snapshot(commit=False)
        if ends_rehearsal(step):
            self._snapshot(commit=True)
            self._manager.end_rehearsal(step)

    def _is_ended_by_a_stop(self) -> bool:
        """Return whether a callback ends training at a step before the last one, as a rank has been asked to stop.

        All ranks agree on it. Once the epoch is over, the position in its data is known no more.
        """
        session, manager = self._session, self._manager
        is_early = self.control.should_training_stop and self.state.global_step < self.state.max_steps
        if not is_early or session.stopping or session.epoch_is_over:
            return False
        # The answer to the first call is that to an earlier question.
        return manager.agree_to_stop() or manager.agree_to_stop()
