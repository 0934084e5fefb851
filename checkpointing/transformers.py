"""Makes any Hugging Face `Trainer` (or `SFTTrainer`) save, resume and stop through a `CheckpointManager`.

    from checkpointing.transformers import resilient
    trainer = resilient(trainer)
    trainer.train()        # resumes from the newest valid checkpoint, if there is one

What the Trainer does itself stays as it is: when to save (`save_strategy`, `save_steps`), how many to keep
(`save_total_limit`), the files' names. How it is done is replaced, and between two saves snapshots are held in memory.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import accelerate
import torch
import torch.distributed as dist
import transformers.trainer
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from checkpointing import rng, sharded
from checkpointing.adapter import Adapter
from checkpointing.cadence import DEFAULT_OVERHEAD_CAP, Auto
from checkpointing.data import CursorBatchSampler, CursorDataLoader, StreamBatches, StreamDataLoader, StreamPosition
from checkpointing.errors import CheckpointError, LossSpike, NonFinite
from checkpointing.failpoints import failpoint
from checkpointing.manager import CheckpointManager, Due, micro_batch_divisor, skipped_steps
from checkpointing.restore import RestorePoint, loop_state_name
from checkpointing.retention import best_by
from checkpointing.snapshotter import SmallFile
from checkpointing.spikes import SkippedSteps, SpikeDetector
from checkpointing.tiers import DEFAULT_LOCAL_KEEP_LAST

TRAINER_STATE_NAME = "trainer_state.json"
# Less than the least that a hang is told from.
_PATIENCE_WITH_STREAM_S = 1.0

TrainerT = TypeVar("TrainerT", bound=Trainer)
# At run time the mixin stands before the trainer's own class; only the type checker needs a base.
_Base: Any = Trainer if TYPE_CHECKING else object


def resilient(
    trainer: TrainerT,
    location: str | None = None,
    *,
    resume: str | int | None = None,
    snapshot_steps: int | Auto | None = "auto",
    save_steps: Auto | None = None,
    save_minutes: float | None = None,
    overhead_cap: float = DEFAULT_OVERHEAD_CAP,
    memory_limit: int | str | None = None,
    keep_every: int | None = None,
    local_tier: str | None = None,
    local_keep_last: int = DEFAULT_LOCAL_KEEP_LAST,
    check_finite: bool = True,
    spike_zscore: float | None = None,
    shuffle_samples: int | None = None,
) -> TrainerT:
    """Give a trainer fault-tolerant checkpoints; returns the same object.

    Args:
        location: where checkpoints are kept; `args.output_dir` by default, a supervisor's choice goes first.
        resume: "auto" (default), "never" or a step; a supervisor's choice goes first.
        save_steps: None leaves it to `args.save_strategy`; "auto" commits when it is worth the measured price, whatever
            `args` say.
        snapshot_steps, save_minutes, overhead_cap, memory_limit, keep_every, local_tier, local_keep_last: see
            `CheckpointManager`.
        check_finite: raise NonFinite from `train` when a step's gradients are infinite or NaN, before anything of that
            step is kept; under a supervisor training then goes on from the newest snapshot before it.
        spike_zscore: raise LossSpike likewise when a step's loss, averaged over all ranks, is further above the median
            of the last 64 than so many (robust) standard deviations; None does not look.
        shuffle_samples: of a streamed data set, how many samples are read ahead and brought into random order; None
            leaves it in its own. In place of `IterableDataset.shuffle`, whose buffer no checkpoint holds.

    Steps that fail so twice are passed over from then on, with those since the snapshot before them: they count, but
    nothing is computed and nothing changes. That takes a supervisor.

    How many checkpoints are kept is `args.save_total_limit`; the best by `args.metric_for_best_model` stays besides.

    Raises:
        CheckpointError: the trainer uses a strategy that is not supported.
        ValueError: a cadence or the memory limit is not usable.
    """
    if trainer.is_deepspeed_enabled:
        raise CheckpointError("DeepSpeed is not supported by resilient() yet; use DDP or FSDP2")
    if trainer.is_fsdp_enabled:
        if not trainer.accelerator.is_fsdp2:
            raise CheckpointError("FSDP1 is not supported by resilient(); use FSDP2: fsdp_config version 2")
        if accelerate.utils.is_peft_model(trainer.model):
            raise CheckpointError("adapters under FSDP are not supported by resilient() yet; use DDP for them")
    if trainer.args.load_best_model_at_end:
        raise CheckpointError("load_best_model_at_end is not supported by resilient() yet; leave it off")
    if spike_zscore is not None and (spike_zscore <= 0 or trainer.args.fp16):
        raise ValueError(
            f"resilient(spike_zscore={spike_zscore}) is not allowed; write a number above 0, 8 for example, and use "
            "bf16 in place of fp16, whose scaler sees to such steps itself"
        )
    if shuffle_samples is not None and shuffle_samples < 1:
        raise ValueError(f"resilient(shuffle_samples={shuffle_samples}) is not allowed; use a number from 1, or None")
    if save_steps not in (None, "auto"):
        raise ValueError(f"resilient(save_steps={save_steps!r}) is not allowed; set args.save_steps, or use 'auto'")
    if save_steps == "auto":
        trainer.args.save_strategy = SaveStrategy.NO
    configured = trainer.args.train_batch_size
    _cut_micro_batches(trainer, micro_batch_divisor())
    best_metric, greater_is_better = best_by(trainer.args.metric_for_best_model, trainer.args.greater_is_better)
    manager = CheckpointManager(
        location or trainer.args.output_dir,
        keep_last=trainer.args.save_total_limit,
        keep_every=keep_every,
        best_metric=best_metric,
        greater_is_better=greater_is_better,
        local_tier=local_tier,
        local_keep_last=local_keep_last,
        resume=resume,
        snapshot_steps=snapshot_steps,
        save_steps=save_steps,
        save_minutes=save_minutes,
        overhead_cap=overhead_cap,
        memory_limit=memory_limit,
    )
    cls = type(trainer)
    trainer.__class__ = type(f"Resilient{cls.__name__}", (_ResilientMixin, cls), {})
    trainer._manager = manager
    trainer._restore_point = trainer._pending_restore = None
    trainer._has_cursor, trainer._shuffle_samples = False, shuffle_samples
    dataset = trainer.train_dataset
    trainer._beginning = _beginning_of(dataset) if _is_stream(dataset) else None
    trainer._stream = trainer._stream_position = None
    trainer._configured_batch, trainer._configured_for = configured, trainer.args.world_size
    trainer._adapter = _adapter_of(trainer.model)
    trainer._stopping = False
    trainer._saves_by_price = save_steps == "auto"
    trainer._due = Due()
    trainer._check_finite, trainer._unchecked = check_finite, None
    trainer._own_norm = trainer._step_loss = None
    trainer._spikes = SpikeDetector(spike_zscore) if spike_zscore is not None else None
    trainer._skipped, trainer._loss_of_skipped = skipped_steps(), None
    trainer._before_evaluation = None
    trainer.add_callback(_StepCallback(trainer))
    return trainer


def load_best(trainer: Any) -> int | None:
    """After training: load the weights of the best checkpoint into the model, on this rank alone.

    Under FSDP all ranks must call it.

    Returns:
        Its step; None where none was evaluated when it was saved, and the model is left as it is.
    """
    trainer._track()
    step: int | None = trainer._manager.load_best(trainer.state.global_step, together=trainer.is_fsdp_enabled)
    return step


class _ResilientMixin(_Base):
    """Overrides put in front of the trainer's own class."""

    # The Trainer's own.
    _train_batch_size: int
    # Of each rank, before anything was cut; and for how many ranks.
    _configured_batch: int
    _configured_for: int
    _manager: CheckpointManager
    _restore_point: RestorePoint | None
    # As above until the first batch of the resumed run is drawn.
    _pending_restore: RestorePoint | None
    # The loader knows its position; else the Trainer's own skipping is used.
    _has_cursor: bool
    _shuffle_samples: int | None
    # Of a streamed data set: its state where an epoch begins, what reads it, and from where the resumed run reads on.
    _beginning: dict[str, Any] | None
    _stream: StreamDataLoader | None
    _stream_position: StreamPosition | None
    # What is saved of a PEFT model.
    _adapter: Adapter | None
    _stopping: bool
    # The Trainer itself was told not to save.
    _saves_by_price: bool
    # What all ranks have agreed on for the step that has just ended.
    _due: Due
    _check_finite: bool
    # Step, norm of its gradients and its loss that nobody has looked at yet.
    _unchecked: tuple[int, torch.Tensor | float | None, torch.Tensor | None] | None
    # Of the step that runs; this rank's.
    _step_loss: torch.Tensor | None
    _spikes: SpikeDetector | None
    _skipped: SkippedSteps
    _loss_of_skipped: tuple[int, torch.Tensor] | None
    # Where the Trainer does not clip, and so does not measure them.
    _own_norm: torch.Tensor | None
    # The generators' states when the evaluation that runs now began; None while none does.
    _before_evaluation: dict[str, Any] | None

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """As `Trainer.train`. A path given explicitly is loaded the Trainer's own way."""
        self._restore_point = self._stream_position = None
        if resume_from_checkpoint in (None, True):
            self._track()
            self._restore_point = self._manager.choose()
            resume_from_checkpoint = _checked_directory(self._restore_point) if self._restore_point else None
            self._look_into_loop_state()
        self._pending_restore = self._restore_point
        try:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        finally:
            if self._restore_point is not None:
                self._restore_point.close()

    def _track(self) -> None:
        self._manager.track(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            scaler=getattr(self.accelerator, "scaler", None),
            adapter=self._adapter,
        )

    # -- data: position is an index ------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        self._has_cursor, self._stream = False, None
        dataset = self.train_dataset
        if self._beginning is not None:
            self._stream = self._stream_loader(dataset)
            return self._stream
        shuffled = self.args.train_sampling_strategy == "random"
        if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            return super().get_train_dataloader()
        if not shuffled and self.args.train_sampling_strategy != "sequential":
            return super().get_train_dataloader()
        if hasattr(dataset, "column_names"):
            dataset = self._remove_unused_columns(dataset, description="training")
            collate = self.data_collator
        else:
            collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        args = self.args
        sampler = CursorBatchSampler(
            num_samples=len(dataset),
            batch_size=self._train_batch_size,
            rank=args.process_index,
            world_size=args.world_size,
            accumulation=args.gradient_accumulation_steps,
            seed=args.data_seed if args.data_seed is not None else args.seed,
            shuffle=shuffled,
            drop_last=args.dataloader_drop_last,
        )
        self._check_global_batch(sampler.global_batch_size)
        self._has_cursor = True
        return CursorDataLoader(
            dataset,
            sampler,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

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
        self._check_global_batch(self._train_batch_size * args.gradient_accumulation_steps * args.world_size)
        self._has_cursor = True
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
            CheckpointError: the checkpoint is of data that is streamed, and here it is not, or the other way round.
        """
        point, name = self._restore_point, loop_state_name(0)
        self._configured_for, self._stream_position = self.args.world_size, None
        if point is None or point.step == 0:
            return
        if point.has(name):
            state = point.json(name)
            with point.reading(name):
                self._configured_for = int(state.get("configured_for", point.world_size))
                if "stream" in state:
                    self._stream_position = StreamPosition.from_json(state["stream"])
            if (self._stream_position is not None) != (self._beginning is not None):
                before, now = ("streamed", "is not") if self._beginning is None else ("not streamed", "is")
                raise CheckpointError(
                    f"{point.place} was trained on data that was {before} ({name}), now it {now}: where to go on "
                    "cannot be told. Read the data as before, or train in another output_dir."
                )
        self._keep_global_batch()

    def _keep_global_batch(self) -> None:
        """On another number of ranks than the batch was configured for: the same samples in each step, in other
        micro-batches.

        The largest that are no larger than those configured; where the ranks cannot share a step's samples equally,
        `_check_global_batch` says so.
        """
        point, args = self._restore_point, self.args
        if point is None or self._configured_for == args.world_size:
            return
        share, rest = divmod(point.samples_consumed // point.step, args.world_size)
        if rest:
            return
        # Halves are of what was configured; those that fit may be larger by chance.
        largest = min(self._train_batch_size, max(self._configured_batch // micro_batch_divisor(), 1))
        size = next(size for size in range(largest, 0, -1) if share % size == 0)
        args.per_device_train_batch_size = size // max(args.n_gpu, 1)
        args.gradient_accumulation_steps = share // size
        self._train_batch_size = size

    def _check_global_batch(self, global_batch_size: int) -> None:
        point = self._restore_point
        if point is None or point.step == 0:
            return
        before = point.samples_consumed // point.step
        if before != global_batch_size:
            raise CheckpointError(
                f"{point.place} was trained with {before} samples per step, now there are {global_batch_size}. Choose "
                "per_device_train_batch_size and gradient_accumulation_steps so that batch x accumulation x ranks = "
                f"{before}, or start anew in another output_dir."
            )

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        point, self._pending_restore = self._pending_restore, None
        if point is not None:
            state = self._restore_loop_state(point)
            if self._has_cursor:
                # Before the first batch is drawn, as in the uninterrupted run; the Trainer does it after.
                self._manager.restore_rng(point)
            if state.get("evaluation_due"):
                self.control.should_evaluate = True
                self._maybe_log_save_evaluate(
                    self._tr_loss, None, self.model_wrapped, None, self.state.epoch, None, 0.0
                )
        if self._stream is None:
            return super().get_batch_samples(*args, **kwargs)
        # A source that is slow for once is no hang: then other limits apply until it answers.
        excuse = threading.Timer(_PATIENCE_WITH_STREAM_S, self._manager.pause)
        excuse.daemon = True
        excuse.start()
        try:
            return super().get_batch_samples(*args, **kwargs)
        finally:
            excuse.cancel()

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # Resumed from the very last step: the Trainer would run one more before it looks.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    # -- steps of which nothing may be kept ----------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step + 1 in self._skipped:
            # Without gradients the optimizer changes nothing.
            skipped: torch.Tensor = self._mean_loss() / self.current_gradient_accumulation_steps
            return skipped
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
        if sharded.is_sharded(norm):
            norm = norm.full_tensor()  # type: ignore[union-attr]
        loss, self._step_loss = self._step_loss, None
        if loss is not None and self.args.world_size > 1:
            loss = loss.clone()
            dist.all_reduce(loss)
            loss /= self.args.world_size
        if loss is None and known is not None and known[0] == step:
            loss = known[2]  # asked twice, as at the end of an epoch
        # A scaler skips such a step itself, and goes on with a smaller scale.
        if not self.accelerator.optimizer_step_was_skipped:
            self._unchecked = (step, norm if self._check_finite else None, loss)
        if known is not None and known[0] != step:
            self._assert_good(*known)
        at_hand = all(not isinstance(value, torch.Tensor) or value.device.type == "cpu" for value in (norm, loss))
        control = self.control
        # An evaluation may lead to a save; and it waits for the device anyway.
        kept = control.should_save or control.should_evaluate or self._due.snapshot or step >= self.state.max_steps
        if self._unchecked is not None and (at_hand or kept):
            self._assert_good(*self._unchecked)
            self._unchecked = None

    def _assert_good(self, step: int, norm: torch.Tensor | float | None, loss: torch.Tensor | None) -> None:
        if norm is not None and not math.isfinite(float(norm)):
            raise NonFinite(step)
        if loss is not None and self._spikes is not None:
            how = self._spikes.look(float(loss))
            if how is not None:
                raise LossSpike(step, how)

    # -- saving --------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._snapshot(commit=True)

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        self._judge_step(grad_norm if grad_norm is not None else self._own_norm)
        if self.control.should_evaluate:
            self._manager.pause()
            # Where this step is saved already, what is cut short could not be saved as due; and without a cursor, the
            # Trainer sets the generators only after it would have been done anew.
            if self._has_cursor and self._manager.wants(self.state.global_step):
                self._before_evaluation = rng.state(self.args.world_size)
        try:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)
        except _EvaluationCutShort:
            self._stopping = True
            self.control.should_evaluate = self.control.should_save = False
            self._snapshot(commit=True)
        finally:
            self._before_evaluation = None
        due, self._due = self._due, Due()
        # After logging and evaluation, as a save would be: what they change belongs to this step.
        if due.snapshot:
            self._snapshot(commit=False)

    def _snapshot(self, *, commit: bool) -> None:
        manager, step = self._manager, self.state.global_step
        if not manager.wants(step):
            return
        if commit:
            self.store_flos()
        self._export_callback_states()
        self._track()
        own: dict[str, SmallFile] = {
            loop_state_name(self.args.process_index): self._capture_loop_state(),
        }
        shared: dict[str, SmallFile] = {}
        if self.args.local_process_index == 0:
            if not manager.static_files:
                manager.static_files = self._configuration_files()
            # The history only grows at its end: a new list around the same entries is enough.
            state = copy.copy(self.state)
            state.log_history = list(state.log_history)
            state.stateful_callbacks = copy.deepcopy(state.stateful_callbacks)
            shared[TRAINER_STATE_NAME] = lambda: _state_bytes(state)
        samples = step * self.get_total_train_batch_size(self.args)
        last = step >= self.state.max_steps
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
            manager.stop(step)

    def _metrics_now(self) -> dict[str, float]:
        """What was evaluated at this step."""
        entries = [entry for entry in self.state.log_history[-3:] if entry.get("step") == self.state.global_step]
        values = {name: value for entry in entries for name, value in entry.items() if name.startswith("eval_")}
        return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}

    def _export_callback_states(self) -> None:
        """As the Trainer does before it saves."""
        for exportable in [*self.callback_handler.callbacks, self.control]:
            if isinstance(exportable, ExportableState):
                self.state.stateful_callbacks[type(exportable).__name__] = exportable.state()

    def _configuration_files(self) -> dict[str, bytes]:
        """Model configuration and tokenizer, in the form that `from_pretrained` reads."""
        with tempfile.TemporaryDirectory() as folder:
            if self._adapter is not None:
                _save_adapter_config(self.model, folder)
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
        state: dict[str, Any] = {"last_logged": self._globalstep_last_logged, "configured_for": self._configured_for}
        if self._stopping and self._before_evaluation is not None:
            # It was cut short, and is done anew by whoever goes on from here.
            state["evaluation_due"] = True
        # Counted since the Trainer added them up the last time, which it does at saves only.
        state["flos"] = self.current_flos
        if self._stream is not None:
            state["stream"] = self._stream.position.to_json()
        if self._spikes is not None:
            state["recent_losses"] = list(self._spikes.losses)
        if hasattr(self, "_metrics"):
            state["metrics"] = {name: list(values) for name, values in self._metrics["train"].items()}
            state["train_tokens"] = self._total_train_tokens
        return lambda: json.dumps({"tr_loss": loss.item(), **state}).encode()

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
            recent = state.get("recent_losses", [])
            numbers = [last_logged, tokens, flos, *recent, *(value for values in metrics.values() for value in values)]
            if not lists or not all(_is_number(number) for number in numbers):
                raise ValueError("something in it is no number")
        self._tr_loss += loss
        self._globalstep_last_logged = last_logged
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
        if self._restore_point is None:
            super()._load_rng_state(checkpoint)
        elif not self._has_cursor:
            self._manager.restore_rng(self._restore_point)


class _EvaluationCutShort(Exception):
    """All ranks have agreed to stop in the middle of an evaluation."""


class _StepCallback(TrainerCallback):
    """Heartbeats and the agreed stop."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer._track()
        self._trainer._manager.announce_batch(self._trainer._train_batch_size, args.gradient_accumulation_steps)
        self._trainer._manager.begin(state.global_step)

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
        self._trainer._manager.pause()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = self._trainer
        if not trainer.is_in_train:
            return
        trainer._manager.pause()
        if trainer._before_evaluation is not None and trainer._manager.agree_to_stop():
            raise _EvaluationCutShort

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer = self._trainer
        due = trainer._due = trainer._manager.end_of_step(state.global_step)
        if due.stop:
            trainer._stopping = True
            control.should_training_stop = True
        if due.stop or due.save or (trainer._saves_by_price and state.global_step >= state.max_steps):
            control.should_save = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer._manager.close()


def _is_stream(dataset: Any) -> bool:
    """Without a length, and able to go on from where it was."""
    return (
        isinstance(dataset, IterableDataset) and hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    )


def _beginning_of(dataset: Any) -> dict[str, Any]:
    """A stream's state before its first sample, whoever has looked into it since it was made.

    Raises:
        CheckpointError: it is divided among the ranks already.
    """
    if getattr(dataset, "_distributed", None) is not None:
        raise CheckpointError(
            "the streamed data set was given through split_dataset_by_node; give it whole: each rank takes its share "
            "of every batch, so that the number of ranks may change"
        )
    if hasattr(dataset, "_prepare_ex_iterable_for_iteration"):
        # datasets' own; its state is that of the last sample that anybody was given.
        dataset = copy.copy(dataset)
        dataset._prepare_ex_iterable_for_iteration()
    state: dict[str, Any] = dataset.state_dict()
    return state


def _cut_micro_batches(trainer: Trainer, divisor: int) -> None:
    """The same samples in each step, in smaller portions: so many, or as many as make equal ones.

    The divisor is kept with the run; whoever has chosen smaller micro-batches since need not have them cut again.
    """
    args = trainer.args
    divisor = math.gcd(args.per_device_train_batch_size, divisor)
    args.per_device_train_batch_size //= divisor
    args.gradient_accumulation_steps *= divisor
    trainer._train_batch_size = args.train_batch_size


def _adapter_of(model: Any) -> Adapter | None:
    """What is saved of a PEFT model; None for any other.

    Raises:
        CheckpointError: it has several adapters.
    """
    if not accelerate.utils.is_peft_model(model):
        return None
    from peft import get_peft_model_state_dict

    if len(model.peft_config) != 1:
        raise CheckpointError(f"resilient() saves one adapter; this model has {', '.join(model.peft_config)}")
    # "auto" would ask the hub whether the vocabulary was resized.
    select: Any = functools.partial(
        get_peft_model_state_dict, model, adapter_name=model.active_adapter, save_embedding_layers=False
    )
    saved = {id(tensor) for tensor in select(state_dict=model.state_dict(keep_vars=True)).values()}
    if any(parameter.requires_grad and id(parameter) not in saved for parameter in model.parameters()):
        # Prompts that are computed, or weights that were unfrozen beside the adapter: all of it is saved, as it is.
        return None
    return Adapter(lambda state: select(state_dict=dict(state)), getattr(model.config, "name_or_path", "") or "")


def _save_adapter_config(model: Any, folder: str) -> None:
    """`adapter_config.json` as `PeftModel.save_pretrained` writes it."""
    config = copy.copy(model.peft_config[model.active_adapter])
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(model.config, "name_or_path", None)
    config.save_pretrained(folder)


def _checked_directory(point: RestorePoint) -> str:
    """The directory that the Trainer may read from: what it will not look at itself has been.

    Raises:
        InvalidCheckpoint: there is no `trainer_state.json`, or it makes no sense.
    """
    state = point.json(TRAINER_STATE_NAME)
    with point.reading(TRAINER_STATE_NAME):
        read = TrainerState(**state)
        if not _is_number(read.global_step) or read.global_step != point.step:
            raise ValueError(f"it is of step {read.global_step}")
        numbers = [read.epoch, read.best_metric, read.total_flos, read.num_input_tokens_seen]
        if not all(number is None or _is_number(number) for number in numbers):
            raise ValueError("epoch, best_metric, total_flos or num_input_tokens_seen is no number")
        if not isinstance(read.best_model_checkpoint, str | None):
            raise ValueError("best_model_checkpoint is no path")
        if not isinstance(read.log_history, list) or not all(isinstance(entry, dict) for entry in read.log_history):
            raise ValueError("log_history is no list of objects")
        if not isinstance(read.stateful_callbacks, dict):
            raise ValueError("stateful_callbacks is no object")
    return str(point.directory)


def _is_number(value: object) -> bool:
    """One that a float can be made of."""
    if isinstance(value, float):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _state_bytes(state: TrainerState) -> bytes:
    """`trainer_state.json` as the Trainer writes it."""
    return (json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n").encode()


def _skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """accelerate's `skip_first_batches`, in O(1) where the loader knows its position."""
    if isinstance(dataloader, CursorDataLoader):
        dataloader.start_at(num_batches)
        return dataloader
    if isinstance(dataloader, StreamDataLoader):
        if not dataloader.told:
            dataloader.drop_first(num_batches)
        return dataloader
    return accelerate.skip_first_batches(dataloader, num_batches)


# The Trainer's loop calls this name and offers no hook: it would draw and drop every index up to the position.
transformers.trainer.skip_first_batches = _skip_first_batches
