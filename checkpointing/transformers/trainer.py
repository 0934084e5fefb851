"""The overrides that are put in front of a trainer's own class."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import logging
import math
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerate
import torch
import torch.distributed as dist
import transformers.trainer
from transformers import Trainer
from transformers.trainer_callback import ExportableState, TrainerControl
from transformers.trainer_utils import get_last_checkpoint

from checkpointing.data.cursor import LoaderCursor
from checkpointing.data.fingerprint import fingerprint
from checkpointing.data.layout import StepLayout
from checkpointing.data.stream import StreamBatches, StreamDataLoader, StreamPosition
from checkpointing.data.stream_source import beginning_of, is_seekable
from checkpointing.environment import ALLOW_CHANGES_ENV, LINEAGE_ENV
from checkpointing.errors import CheckpointError, CommitFailed, LossSpike, NonFinite, Preempted
from checkpointing.failpoints import failpoint
from checkpointing.layout import loop_state_name
from checkpointing.rank import rng, sharding
from checkpointing.rank.adapter import Adapter
from checkpointing.rank.device import Later
from checkpointing.rank.manager import CheckpointManager, Due, skipped_steps
from checkpointing.rank.restore import own_checkpoint, read_checkpoint
from checkpointing.rank.restore_point import RestorePoint
from checkpointing.rank.snapshotter import SmallFile
from checkpointing.rank.spikes import SkippedSteps, SpikeDetector
from checkpointing.transformers.callback import EvaluationCutShort, Saves, StepCallback
from checkpointing.transformers.coverage import changed, uncovered
from checkpointing.transformers.overrides import added_files, overrides_saving
from checkpointing.transformers.peft import adapter_of, save_adapter_config
from checkpointing.transformers.trackers import continue_trackers
from checkpointing.transformers.trainer_state import TRAINER_STATE_NAME, checked_directory, is_number, state_bytes

logger = logging.getLogger("checkpointing")
# Packages whose trainers are methods of their own.
_TRAINERS = ("transformers.", "trl.", "sentence_transformers.")
_ID_LENGTH = 16
# Less than the smallest hang timeout.
_PATIENCE_WITH_STREAM_S = 1.0

# At run time the mixin stands before the trainer's own class; only the type checker needs a base.
_Base: Any = Trainer if TYPE_CHECKING else object


class ResilientMixin(_Base):
    """Overrides put in front of the trainer's own class."""

    # The Trainer's own.
    _train_batch_size: int
    _manager: CheckpointManager
    _restore_point: RestorePoint | None
    # As above until the first batch of the resumed run is drawn.
    _pending_restore: RestorePoint | None
    # How steps were divided when the run began, and are now.
    _made_for: StepLayout
    # The position in the trainer's own loader; None where that cannot be followed, and while there is none.
    _cursor: LoaderCursor | None
    _shuffle_samples: int | None
    # Of a streamed data set: its state where an epoch begins, what reads it, and from where the resumed run reads on.
    _beginning: dict[str, Any] | None
    _stream: StreamDataLoader | None
    _stream_position: StreamPosition | None
    # What is saved of a PEFT model.
    _adapter: Adapter | None
    # Further objects that are saved, by name.
    _states: dict[str, Any]
    _saves: Saves
    _stopping: bool
    # The Trainer itself was told not to save.
    _saves_by_price: bool
    # What all ranks have agreed on for the step that has just ended.
    _due: Due
    _check_finite: bool
    # Step, norm of its gradients and its loss that nobody has looked at yet.
    _unchecked: tuple[int, Later | None, Later | None] | None
    # Of the step that runs; this rank's.
    _step_loss: torch.Tensor | None
    _spikes: SpikeDetector | None
    _skipped: SkippedSteps
    _loss_of_skipped: tuple[int, torch.Tensor] | None
    # Where the Trainer does not clip, and so does not measure them.
    _own_norm: torch.Tensor | None
    # The norm and the learning rate for an entry at the epoch's end; of a resumed run at first the saved ones.
    _last_norm: torch.Tensor | float | None
    _last_rate: float | None
    # The generators' states when the evaluation that runs now began; None while none does.
    _before_evaluation: dict[str, Any] | None
    # Likewise, after an evaluation that was done again.
    _after_evaluation: dict[str, Any] | None
    # Where overrides of the user's write while they are to be looked at.
    _staging: str | None
    _known_job: dict[str, str | None] | None
    # The loss added up by the Trainer is that of the steps from here on.
    _loss_since: int
    _finalizing: bool
    # What trackers call the run that this training is part of.
    _tracked_as: str
    _has_trackers: bool
    # What could change without being saved, as training began; None once that was looked at.
    _uncovered: dict[str, str] | None

    def _become_resilient(
        self,
        make_manager: Callable[[], CheckpointManager],
        *,
        states: Mapping[str, Any],
        divisor: int,
        saves_by_price: bool,
        check_finite: bool,
        spike_zscore: float | None,
        seekable_stream: bool,
        shuffle_samples: int | None,
    ) -> None:
        """What `resilient` does once it knows that it can."""
        args = self.args
        self._made_for = StepLayout(args.world_size, args.train_batch_size, args.gradient_accumulation_steps)
        if divisor > 1 and hasattr(self, "_buffered_inputs"):
            raise CheckpointError(
                f"{type(self).__name__} ran out of memory, and its micro-batches cannot be halved: their samples are "
                "groups of one prompt. Choose a smaller per_device_train_batch_size or steps_per_generation"
            )
        _cut_micro_batches(self, divisor)
        self._make_manager, self._manager = make_manager, make_manager()
        self._states = dict(states)
        self._shuffle_samples, self._saves_by_price = shuffle_samples, saves_by_price
        self._check_finite, self._spike_zscore = check_finite, spike_zscore
        self._adapter = adapter_of(self.model)
        if seekable_stream and not is_seekable(self.train_dataset):
            raise ValueError(
                "resilient(seekable_stream=True) is for an IterableDataset with state_dict and load_state_dict; "
                f"train_dataset is {type(self.train_dataset).__name__}"
            )
        self._beginning = beginning_of(self.train_dataset) if seekable_stream else None
        self._skipped = skipped_steps()
        self._saves = Saves(self)
        self._staging = None
        self._forget_last_training()
        self.add_callback(StepCallback(self))

    def _forget_last_training(self) -> None:
        self._restore_point = self._pending_restore = None
        self._cursor = self._stream = self._stream_position = None
        self._stopping, self._due = False, Due()
        self._unchecked = self._own_norm = self._step_loss = self._loss_of_skipped = None
        # Token ids that all ranks have computed, padding among them, if they had as many as this one.
        self._num_ids = 0
        self._spikes = SpikeDetector(self._spike_zscore) if self._spike_zscore is not None else None
        self._last_norm = self._last_rate = None
        self._before_evaluation = self._after_evaluation = None
        self._uncovered = self._known_job = None
        self._finalizing = False
        self._saves.forget()

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """As `Trainer.train`, from the newest checkpoint of this run. A path is where to start while there is none.

        Called again after training has ended, it is another stage: it has checkpoints of its own.
        """
        if self._manager.is_closed:
            self._manager = self._make_manager()
        self._forget_last_training()
        self._track()
        # As the script gives the data: trainers may leave some out when training begins.
        self._job()
        # The model may be put there later only (FSDP2).
        self._restore_point = self._manager.choose(on_device=self.args.device.type != "cpu")
        self._tracked_as = self._name_for_trackers(self._restore_point)
        start: str | bool | None = None
        if self._restore_point is None:
            start = resume_from_checkpoint or self._manager.starting_folder
            if start is True:
                start = get_last_checkpoint(self.args.output_dir) or True
            found = own_checkpoint(Path(start)) if isinstance(start, (str, os.PathLike)) else None
            if found is not None:
                args = self.args
                self._restore_point = read_checkpoint(*found, args.process_index, args.world_size)
        if self._restore_point is not None:
            start = checked_directory(self._restore_point)
        self._look_into_loop_state()
        self._has_trackers = continue_trackers(self.callback_handler.callbacks, self._tracked_as)
        first_step = self._restore_point.step if self._restore_point is not None else _step_of(start)
        self._manager.check_way(first_step)
        self._pending_restore = self._restore_point
        evaluates_first = self.args.eval_on_start
        # It has been done; its figures are in the history.
        self.args.eval_on_start = evaluates_first and self._restore_point is None
        try:
            return super().train(resume_from_checkpoint=start or None, **kwargs)
        finally:
            self.args.eval_on_start = evaluates_first
            if self._restore_point is not None:
                self._restore_point.close()

    def _name_for_trackers(self, point: RestorePoint | None) -> str:
        """A supervisor knows the run from its first attempt on; without one, its checkpoints do."""
        lineage, name = os.environ.get(LINEAGE_ENV), loop_state_name(0)
        if lineage:
            return hashlib.sha256(f"{lineage}/{self._manager.stage_name}".encode()).hexdigest()[:_ID_LENGTH]
        if point is not None and point.has(name):
            known = point.json(name).get("tracked_as")
            if isinstance(known, str) and known.isalnum():
                return known
        return uuid.uuid4().hex[:_ID_LENGTH]

    def _track(self) -> None:
        self._manager.track(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            scaler=getattr(self.accelerator, "scaler", None),
            states=self._further_states(),
            adapter=self._adapter,
        )

    def _further_states(self) -> dict[str, Any]:
        """The user's, and what TRL and callbacks keep beside the model."""
        states: dict[str, Any] = {}
        if hasattr(self, "_buffered_inputs"):
            states["generation_buffer"] = _Attributes(
                self, lambda name: name in _STEPS or name.startswith("_buffered_")
            )
        figures = _Attributes(self, lambda name: name == "stats" or name.endswith(_FIGURES))
        if figures.state_dict():
            states["figures"] = figures
        for callback in self.callback_handler.callbacks:
            # TRL's, for reference models and teachers that follow the model.
            if any(c.__name__ == "SyncRefModelCallback" for c in type(callback).__mro__):
                states["ref_model"] = self.accelerator.unwrap_model(callback.ref_model)
            if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
                states[f"callback_{type(callback).__name__}"] = callback
        return states | self._states

    def _on_train_begin(self) -> None:
        manager = self._manager
        self._track()
        if self._restore_point is not None:
            # Callbacks may have reset themselves in on_train_begin.
            names = {name for name in self._further_states() if name.startswith("callback_")}
            manager.restore_states(self._restore_point, names)
        manager.announce_batch(self._train_batch_size, self.args.gradient_accumulation_steps)
        manager.begin(self.state.global_step, self.state.max_steps)
        self._loss_since = self.state.global_step
        self._uncovered = uncovered(self, self._covered())

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """`train_loss` is that of the run, not of its last process; `load_best_model_at_end` by our checkpoints."""
        self._finalizing = True
        try:
            output = self._finalize_with_best(*args, **kwargs)
        finally:
            self._finalizing = False
        return output._replace(training_loss=self._loss_of_run())

    def _loss_of_run(self) -> float:
        num_steps: int = self.state.global_step - self._loss_since
        return float(self._total_loss_scalar) / max(num_steps, 0.001)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if self._finalizing and "train_loss" in logs:
            logs["train_loss"] = self._loss_of_run()
        super().log(logs, *args, **kwargs)

    def _finalize_with_best(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer would look for folders of its own, and remove some of them."""
        if not self.args.load_best_model_at_end:
            return super()._finalize_training(*args, **kwargs)
        self.args.load_best_model_at_end, best = False, self.state.best_global_step
        # Of a checkpoint that a stock Trainer has begun with.
        self.state.best_model_checkpoint = None
        try:
            if best and not self._stopping:
                best = self._load_best_of(best)
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.load_best_model_at_end = True
            if best and not self._stopping:
                self.state.best_model_checkpoint = self._manager.folder_of(best)

    def _load_best_of(self, step: int) -> int | None:
        """Returns the step whose weights the model has then."""
        manager = self._manager
        try:
            manager.wait_for_commit()
        except CommitFailed as error:
            logger.warning("the last checkpoint was not committed (%s); the best one of those before is loaded", error)
        self._track()
        return manager.load_best(self.state.global_step, together=True, preferred=step)

    def _on_train_end(self) -> None:
        manager = self._manager
        manager.finished = not self._stopping and self.state.global_step >= self.state.max_steps
        manager.close()
        self._saves.tell_all()

    def _covered(self) -> set[int]:
        return {id(value) for value in self._further_states().values()} | {
            id(value) for value in (self.optimizer, self.lr_scheduler, getattr(self, "_manager", None))
        }

    # -- data: the trainer's own order, and the position in it -----------------------------------------------------

    def get_train_dataloader(self) -> Any:
        self._cursor = self._stream = None
        self._manager.forget_positions()
        if self._beginning is not None:
            self._stream = self._stream_loader(self.train_dataset)
            return self._stream
        loader, args = super().get_train_dataloader(), self.args
        now = StepLayout(args.world_size, self._train_batch_size, args.gradient_accumulation_steps)
        if args.auto_find_batch_size and self._restore_point is None:
            # The Trainer may restart with smaller batches.
            self._made_for = now
        self._check_samples_per_step(now.samples_per_step)
        seed = args.data_seed if args.data_seed is not None else args.seed
        try:
            cursor = LoaderCursor(loader, seed=seed, rank=args.process_index, made_for=self._made_for, now=now)
        except CheckpointError as error:
            if self._made_for != now:
                raise
            logger.warning("%s: a resumed run reads it again from the beginning, as the Trainer does", error)
            return loader
        self._cursor = cursor
        self._manager.follow(cursor)
        return loader

    def _stream_loader(self, dataset: Any) -> StreamDataLoader:
        args = self.args
        batches = StreamBatches(
            dataset,
            self._train_batch_size,
            args.process_index,
            args.world_size,
            seed=args.data_seed if args.data_seed is not None else args.seed,
            shuffle_samples=self._shuffle_samples,
            beginning=self._beginning,
        )
        self._check_samples_per_step(self._train_batch_size * args.gradient_accumulation_steps * args.world_size)
        loader = StreamDataLoader(
            batches,
            self._get_collator_with_removed_columns(self.data_collator, description="training"),
            args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
        )
        if self._stream_position is not None:
            loader.start_at(self._stream_position)
        return loader

    def _look_into_loop_state(self) -> None:
        """What must be known before the data loader is made.

        Raises:
            CheckpointError: the checkpoint is of another job.
        """
        point, name = self._restore_point, loop_state_name(0)
        if point is None or point.step == 0 or not point.has(name):
            return
        state = point.json(name)
        with point.reading(name):
            if "made_for" in state:
                counts = [int(state["made_for"][key]) for key in ("world_size", "batch_size", "accumulation")]
                if min(counts) < 1:
                    raise ValueError("a step was divided into no parts")
                self._made_for = StepLayout(*counts)
            if "stream" in state:
                self._stream_position = StreamPosition.from_json(state["stream"])
            job = dict(state.get("job", {}))
        if (self._stream_position is not None) != (self._beginning is not None):
            before, now = ("streamed", "is not") if self._beginning is None else ("not streamed", "is")
            raise CheckpointError(
                f"{point.place} was trained on data that was {before} ({name}), now it {now}: where to go on "
                "cannot be told. Read the data as before, or train in another output_dir."
            )
        self._check_job(point, job)
        self._keep_samples_per_step()

    def _job(self) -> dict[str, str | None]:
        """What makes this the same job, as far as the trainer knows; looked up once for each training."""
        if self._known_job is not None:
            return self._known_job
        self._known_job = {
            # What trains: the library's class, of which the script may have made one of its own.
            "trainer": next(c.__name__ for c in type(self).__mro__ if c.__module__.startswith(_TRAINERS)),
            "training data": fingerprint(self.train_dataset),
        }
        return self._known_job

    def _check_job(self, point: RestorePoint, before: Mapping[str, Any]) -> None:
        if os.environ.get(ALLOW_CHANGES_ENV) == "1":
            return
        now = self._job()
        other = [key for key, value in before.items() if value is not None and now.get(key) not in (None, value)]
        if other:
            differences = ", ".join(f"{key} was {before[key]}, is {now[key]}" for key in other)
            raise CheckpointError(
                f"{point.place} is of another job: {differences}. Train in another output_dir; or, if it is the same "
                f"job after a change, resume with --allow-changes (or {ALLOW_CHANGES_ENV}=1)"
            )

    def _keep_samples_per_step(self) -> None:
        """On another number of ranks than the run began on: the same samples in each step, in other micro-batches.

        The largest that are no larger than those configured; where the ranks cannot share a step's samples equally,
        `_check_samples_per_step` says so.
        """
        args, was = self.args, self._made_for
        if was.world_size == args.world_size:
            return
        share, rest = divmod(was.samples_per_step, args.world_size)
        if rest:
            return
        largest = min(self._train_batch_size, was.batch_size)
        size = next(size for size in range(largest, 0, -1) if share % size == 0)
        args.per_device_train_batch_size = size // max(args.n_gpu, 1)
        args.gradient_accumulation_steps = share // size
        self._train_batch_size = size

    def _check_samples_per_step(self, samples: int) -> None:
        point = self._restore_point
        if point is None or point.step == 0:
            return
        before = point.samples_consumed // point.step
        if before != samples:
            raise CheckpointError(
                f"{point.place} was trained with {before} samples per step, now there are {samples}. Choose "
                "per_device_train_batch_size and gradient_accumulation_steps so that batch x accumulation x ranks = "
                f"{before}, or start from the beginning in another output_dir."
            )

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        position: tuple[int, int] = super()._init_training_state(max_steps, num_update_steps_per_epoch, *args, **kwargs)
        point, cursor = self._restore_point, self._cursor
        if point is None or cursor is None or self.args.ignore_data_skip:
            return position
        saved = self._manager.positions_in(point)
        if not saved:
            # Older than positions are: by the number of steps, as the Trainer counts.
            cursor.skip(position[1])
            return position
        name, state = "its position in the data", dict(saved[0])
        with point.reading(name):
            return cursor.resume(state, num_update_steps_per_epoch)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        cursor, point, state = self._cursor, self._pending_restore, self.state
        if cursor is not None:
            cursor.begin_epoch(kwargs["epoch"])
        steps, in_epoch = kwargs["steps_trained_in_current_epoch"], kwargs["steps_in_epoch"]
        over = state.global_step >= state.max_steps or self._ended_early()
        if over and not (point is not None and steps and cursor is not None):
            # Resumed from the very last step: the Trainer would run one more before it looks.
            self.control.should_training_stop = True
            return
        if point is not None and cursor is not None and steps and (over or steps >= in_epoch):
            # Only the end of the epoch is left, with what is evaluated, logged and saved there.
            cursor.skip_epoch()
            self._manager.restore_rng(point)
            self._begin_resumed()
            if over:
                self.control.should_training_stop = True
            kwargs["num_update_steps_per_epoch"] = 0
        super()._run_epoch(*args, **kwargs)

    def _ended_early(self) -> bool:
        """A callback had ended training when the checkpoint was made."""
        point, name = self._pending_restore, loop_state_name(0)
        return point is not None and point.has(name) and bool(point.json(name).get("ended"))

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_resumed()
        if self._stream is None:
            batches, count = super().get_batch_samples(*args, **kwargs)
            if self._cursor is not None:
                self._cursor.consume(len(batches))
            return batches, count
        # A source that is slow for once is no hang: then other limits apply until it answers.
        excuse = threading.Timer(_PATIENCE_WITH_STREAM_S, self._manager.pause)
        excuse.daemon = True
        excuse.start()
        try:
            return super().get_batch_samples(*args, **kwargs)
        finally:
            excuse.cancel()

    def _begin_resumed(self) -> None:
        """Once, before the first batch of a resumed run is drawn."""
        point, self._pending_restore = self._pending_restore, None
        if point is None:
            return
        state = self._restore_loop_state(point)
        if self._stream is not None or state.get("evaluation_due"):
            self._manager.restore_rng(point)
        if state.get("evaluation_due"):
            self.control.should_evaluate = True
            self._maybe_log_save_evaluate(self._tr_loss, None, self.model_wrapped, None, self.state.epoch, None, 0.0)
            # The Trainer sets the generators again once the first batch is drawn.
            self._after_evaluation = rng.state(self.args.world_size)

    # -- steps of which nothing may be kept ----------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step + 1 in self._skipped:
            # Without gradients the optimizer changes nothing.
            skipped: torch.Tensor = self._mean_loss() / self.current_gradient_accumulation_steps
            return skipped
        ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
        if isinstance(ids, torch.Tensor):
            self._num_ids += ids.numel() * self.args.world_size
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        if self._spikes is not None:
            self._step_loss = loss if self._step_loss is None else self._step_loss + loss
        return loss

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        result = super().compute_loss(*args, **kwargs)
        if self.model.training and failpoint("training.loss"):
            return (result[0] * math.nan, *result[1:]) if isinstance(result, tuple) else result * math.nan
        return result

    def _mean_loss(self) -> torch.Tensor:
        """What a skipped step adds to the losses, so that their mean stays as it is: it is looked up once."""
        step, known = self.state.global_step, self._loss_of_skipped
        if known is None or known[0] != step:
            num_steps = step - self._globalstep_last_logged
            logged = (entry["loss"] for entry in reversed(self.state.log_history) if "loss" in entry)
            last = torch.full_like(self._tr_loss, next(logged, 0.0))
            known = self._loss_of_skipped = (step, self._tr_loss / num_steps if num_steps else last)
        return known[1]

    def _judge_step(self, norm: torch.Tensor | float | None) -> None:
        """Look at the step before, which the device has computed by now; and at this one before it is saved.

        Gradients are averaged over all ranks, and so is the loss here: what one of them has spoiled, all see.
        """
        step, known = self.state.global_step, self._unchecked
        if sharding.is_sharded(norm):
            norm = norm.full_tensor()  # type: ignore[union-attr]
        loss, self._step_loss = self._step_loss, None
        if loss is not None and self.args.world_size > 1:
            loss = loss.clone()
            dist.all_reduce(loss)
            loss /= self.args.world_size
        step_loss = Later(loss) if loss is not None else None
        if loss is None and known is not None and known[0] == step:
            step_loss = known[2]  # asked twice, as at the end of an epoch
        # A scaler skips a step without finite gradients and continues with a smaller scale. A fused optimizer skips it
        # itself, and accelerate does not report that: the norm says nothing then.
        looks_at_norm = self._check_finite and self.accelerator.scaler is None
        if not self.accelerator.optimizer_step_was_skipped:
            self._unchecked = (step, Later(norm) if norm is not None and looks_at_norm else None, step_loss)
        if known is not None and known[0] != step:
            self._assert_good(*known)
        at_hand = self._unchecked is not None and all(one is None or one.is_at_hand for one in self._unchecked[1:])
        control = self.control
        # An evaluation may lead to a save; and it waits for the device anyway.
        kept = control.should_save or control.should_evaluate or self._due.snapshot or step >= self.state.max_steps
        if self._unchecked is not None and (at_hand or kept):
            self._assert_good(*self._unchecked)
            self._unchecked = None

    def _assert_good(self, step: int, norm: Later | None, loss: Later | None) -> None:
        if norm is not None and not math.isfinite(float(norm)):
            raise NonFinite(step)
        if loss is not None and self._spikes is not None:
            how = self._spikes.look(float(loss))
            if how is not None:
                raise LossSpike(step, how)

    # -- saving --------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._staging is not None:
            # An override that asks for it again.
            super()._save_checkpoint(model, trial)
            return
        if not self._manager.wants(self.state.global_step):
            return
        added: dict[str, bytes] = {}
        if overrides_saving(type(self)):
            with self._staged():
                super()._save_checkpoint(model, trial)
                added = added_files(Path(self._staging or "", f"checkpoint-{self.state.global_step}"))
        self._snapshot(commit=True, added=added)

    @contextlib.contextmanager
    def _staged(self) -> Iterator[None]:
        """Let the trainer's own methods write a checkpoint into a folder that nobody resumes from."""
        state, output_dir = self.state.stateful_callbacks, self.args.output_dir
        with tempfile.TemporaryDirectory(prefix="checkpoint-staging-", dir=self._manager.scratch) as folder:
            self._staging = self.args.output_dir = folder
            # Ranks that write nothing may look into it, too.
            Path(folder, f"checkpoint-{self.state.global_step}").mkdir()
            self.state.stateful_callbacks = copy.deepcopy(state)
            try:
                yield
            finally:
                self._staging, self.args.output_dir = None, output_dir
                self.state.stateful_callbacks = state

    def _get_output_dir(self, trial: Any) -> str:
        folder: str = self._staging if self._staging is not None else super()._get_output_dir(trial)
        return folder

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._staging is None:
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        if self._staging is None:
            super()._save_scaler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        if self._staging is None:
            super()._save_rng_state(output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staging is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, *args: Any, learning_rate: Any = None, **kwargs: Any
    ) -> None:
        # At an epoch's end of which only that was left, there was no step that had any.
        grad_norm = self._last_norm if grad_norm is None else grad_norm
        learning_rate = self._last_rate if learning_rate is None else learning_rate
        self._last_norm, self._last_rate = grad_norm, learning_rate
        self._judge_step(grad_norm if grad_norm is not None else self._own_norm)
        if self.control.should_evaluate:
            self._manager.pause()
            # Where this step is saved already, what is cut short could not be saved as due; and without a position, the
            # Trainer sets the generators only after it would have been repeated.
            followed = self._cursor is not None or self._stream is not None
            if followed and self._manager.wants(self.state.global_step):
                self._before_evaluation = rng.state(self.args.world_size)
        try:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, learning_rate=learning_rate, **kwargs)
        except EvaluationCutShort:
            self._stopping = True
            self.control.should_evaluate = self.control.should_save = False
            self._snapshot(commit=True)
        finally:
            self._before_evaluation = None
        due, self._due = self._due, Due()
        # After logging and evaluation, as a save would be: what they change belongs to this step.
        if due.snapshot:
            self._snapshot(commit=False)

    def _snapshot(self, *, commit: bool, added: Mapping[str, bytes] | None = None) -> None:
        manager, step = self._manager, self.state.global_step
        if not manager.wants(step):
            return
        if commit:
            self.store_flos()
            self._warn_of_uncovered()
        self._export_callback_states()
        self._track()
        own: dict[str, SmallFile] = {
            loop_state_name(self.args.process_index): self._capture_loop_state(),
            **(added or {}),
        }
        shared: dict[str, SmallFile] = {}
        if self.args.local_process_index == 0:
            if not manager.static_files:
                manager.static_files = self._configuration_files()
            # The history only grows at its end: a new list around the same entries is enough.
            state = copy.copy(self.state)
            state.log_history = list(state.log_history)
            state.stateful_callbacks = copy.deepcopy(state.stateful_callbacks)
            shared[TRAINER_STATE_NAME] = lambda: state_bytes(state)
        samples = step * self._made_for.samples_per_step
        # Also the best one so far, if it is to be loaded at the end: it must not be skipped as memory is busy.
        last = step >= self.state.max_steps or (
            self.args.load_best_model_at_end and commit and step == self.state.best_global_step
        )
        manager.save(
            step,
            samples,
            own,
            shared,
            metrics=self._metrics_now(),
            wait=self._stopping or last,
            commit=commit,
            generators=self._before_evaluation if self._stopping else None,
        )
        if self._stopping:
            try:
                manager.stop(step)
            except Preempted:
                self._saves.tell_all()
                raise

    def _warn_of_uncovered(self) -> None:
        """At the first save, once."""
        before, self._uncovered = self._uncovered, None
        if before is None or not self.args.should_save:
            return
        names = changed(before, uncovered(self, self._covered()))
        if names:
            logger.warning(
                "training has changed what no checkpoint holds: %s. A resumed run begins with it as the script makes "
                "it. If that matters, pass objects with state_dict and load_state_dict to resilient(..., "
                "states={...}), or derive the callback from transformers' ExportableState",
                ", ".join(names),
            )

    def _metrics_now(self) -> dict[str, float]:
        """What was evaluated at this step."""
        entries = [entry for entry in self.state.log_history[-3:] if entry.get("step") == self.state.global_step]
        values = {name: value for entry in entries for name, value in entry.items() if name.startswith("eval_")}
        return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}

    def _export_callback_states(self) -> None:
        """As the Trainer does before it saves; several of one class as a list."""
        states: dict[str, Any] = {}
        for exportable in [*self.callback_handler.callbacks, self.control]:
            if isinstance(exportable, ExportableState):
                states.setdefault(type(exportable).__name__, []).append(exportable.state())
        self.state.stateful_callbacks |= {name: found if len(found) > 1 else found[0] for name, found in states.items()}

    def _load_callback_state(self) -> None:
        """Always, where this run is resumed; `restore_callback_states_from_checkpoint` is for other starts."""
        point = self._restore_point
        if point is None:
            super()._load_callback_state()
            return
        with point.reading(TRAINER_STATE_NAME):
            for name, saved in self.state.stateful_callbacks.items():
                states = saved if isinstance(saved, list) else [saved]
                own = [callback for callback in self.callback_handler.callbacks if type(callback).__name__ == name]
                # In place: the script may hold them. The control is the loop's own.
                for callback, state in zip(own, states, strict=False):
                    if isinstance(callback, ExportableState) and not isinstance(callback, TrainerControl):
                        for attribute, value in state.get("attributes", {}).items():
                            setattr(callback, attribute, value)

    def _configuration_files(self) -> dict[str, bytes]:
        """Model configuration and tokenizer, in the form that `from_pretrained` reads."""
        with tempfile.TemporaryDirectory(dir=self._manager.scratch) as folder:
            if self._adapter is not None:
                save_adapter_config(self.model, folder)
            else:
                self._save_model_config(folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}

    def _save_model_config(self, folder: str) -> None:
        config = getattr(self.model, "config", None)
        if config is not None:
            # FSDP2 puts a class of its own in front.
            own = type(self.model)
            own = own.__bases__[1] if self.is_fsdp_enabled else own
            config.architectures = [own.__name__]
            config.save_pretrained(folder)
        generation_config = getattr(self.model, "generation_config", None)
        if generation_config is not None:
            generation_config.save_pretrained(folder)

    # -- the loop's own variables: what the Trainer forgets between two logs -------------------------------------

    def _capture_loop_state(self) -> SmallFile:
        # Read from the device later: now it would have to wait for all work enqueued there.
        loss = self._tr_loss.detach().clone()
        norm = self._last_norm
        if sharding.is_sharded(norm):
            # Together, here: the copying thread must not wait for other ranks' gradients.
            norm = norm.full_tensor()  # type: ignore[union-attr]
        state: dict[str, Any] = {
            "last_logged": self._globalstep_last_logged,
            "made_for": dataclasses.asdict(self._made_for),
            "job": self._job(),
            "learning_rate": self._last_rate,
            # By a callback; a stop on request is none of its own, and at the last step there may be more next time.
            "ended": self.control.should_training_stop
            and not self._stopping
            and self.state.global_step < self.state.max_steps,
        }
        if self._stopping and self._before_evaluation is not None:
            # The evaluation was cut short; the resumed run repeats it.
            state["evaluation_due"] = True
        # Counted since the Trainer added them up the last time, which it does at saves only.
        state["flos"] = self.current_flos
        state["total_loss"], state["loss_since"] = self._total_loss_scalar, self._loss_since
        if self._has_trackers and not os.environ.get(LINEAGE_ENV):
            # Two runs differ in it; where a supervisor knows it, checkpoints of equal runs stay equal.
            state["tracked_as"] = self._tracked_as
        if self._stream is not None:
            state["stream"] = self._stream.position.to_json()
        if self._spikes is not None:
            state["recent_losses"] = list(self._spikes.losses)
        if hasattr(self, "_metrics"):
            state["metrics"] = {name: list(values) for name, values in self._metrics["train"].items()}
            state["train_tokens"] = getattr(self, "_total_train_tokens", 0)
        return lambda: json.dumps(
            {"tr_loss": loss.item(), "grad_norm": float(norm) if norm is not None else None, **state}
        ).encode()

    def _restore_loop_state(self, point: RestorePoint) -> dict[str, Any]:
        # A rank that was not there takes rank 0's: all must do the same next.
        name = next(filter(point.has, map(loop_state_name, (self.args.process_index, 0))), None)
        if name is None:
            return {}
        state = point.json(name)
        with point.reading(name):
            loss, last_logged, metrics = float(state["tr_loss"]), state["last_logged"], state.get("metrics", {})
            tokens = state["train_tokens"] if "metrics" in state else 0
            lists = all(isinstance(values, list) for values in metrics.values())
            flos = state.get("flos", 0)
            # Older checkpoints know neither.
            total_loss, loss_since = float(state.get("total_loss", 0.0)), state.get("loss_since", point.step)
            recent = state.get("recent_losses", [])
            last = [state.get("grad_norm"), state.get("learning_rate")]
            last = [value for value in last if value is not None and value == value and abs(value) < math.inf]
            numbers = [
                last_logged,
                tokens,
                flos,
                loss_since,
                *recent,
                *last,
                *(value for values in metrics.values() for value in values),
            ]
            if not lists or not all(is_number(number) for number in numbers):
                raise ValueError("something in it is no number")
        self._tr_loss += loss
        self._total_loss_scalar, self._loss_since = total_loss, loss_since
        self._globalstep_last_logged = last_logged
        self._last_norm, self._last_rate = state.get("grad_norm"), state.get("learning_rate")
        self.current_flos = flos
        if self._spikes is not None:
            self._spikes.losses.clear()
            self._spikes.losses.extend(recent)
        if "metrics" in state and hasattr(self, "_metrics"):
            self._metrics["train"].update(metrics)
            self._total_train_tokens = tokens
        return state

    # -- restoring -----------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._restore_point is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        self._track()
        self._manager.restore_model(self._restore_point)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._restore_point is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self._track()
        self._manager.restore_optimizer(self._restore_point)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._restore_point is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The Trainer calls it where an epoch begins, or once the first batch of a resumed one is drawn."""
        if self._restore_point is None:
            super()._load_rng_state(checkpoint)
        elif self._after_evaluation is not None:
            rng.set_state(self._after_evaluation)
        elif self._stream is None:
            self._manager.restore_rng(self._restore_point)


# What TRL's online trainers count by in what they have generated, and add up between two log entries.
_STEPS = ("_step", "_buffer_step")
_FIGURES = ("_loss_total", "_step_equiv", "_step_eq", "matched_sum")


class _Attributes:
    """Attributes of a trainer as an object with a state; each rank may have its own."""

    def __init__(self, trainer: Any, wanted: Callable[[str], bool]) -> None:
        self._trainer, self._wanted = trainer, wanted

    def state_dict(self) -> dict[str, Any]:
        found = {name: value for name, value in vars(self._trainer).items() if self._wanted(name)}
        if isinstance(found.get("stats"), dict):
            found["stats"] = {name: list(values) for name, values in found["stats"].items()}
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self._trainer).update(state)


def _cut_micro_batches(trainer: Trainer, divisor: int) -> None:
    """The same samples in each step, in smaller portions: so many, or as many as make equal ones.

    The divisor is kept with the run; micro-batches that were configured smaller since are not cut again.
    """
    args = trainer.args
    divisor = math.gcd(args.per_device_train_batch_size, divisor)
    args.per_device_train_batch_size //= divisor
    args.gradient_accumulation_steps *= divisor
    trainer._train_batch_size = args.train_batch_size


def _step_of(start: str | bool | None) -> int:
    """Of a stock Trainer's checkpoint; 0 where there is none to start from."""
    try:
        with (Path(str(start)) / TRAINER_STATE_NAME).open() as file:
            return int(json.load(file)["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """accelerate's `skip_first_batches`, by position where the loader is followed."""
    if isinstance(dataloader, StreamDataLoader):
        if not dataloader.is_positioned:
            dataloader.drop_first(num_batches)
        return dataloader
    cursor = LoaderCursor.of(dataloader)
    if cursor is None:
        return accelerate.skip_first_batches(dataloader, num_batches)
    if cursor.skips_epoch:
        return dataloader
    if not cursor.resumes_mid_epoch:
        # A stock checkpoint says no more.
        cursor.skip(num_batches)
    return cursor.remaining()


# The Trainer's loop calls this name and offers no hook: accelerate's function would build
# another loader, whose position nobody follows.
transformers.trainer.skip_first_batches = _skip_first_batches
