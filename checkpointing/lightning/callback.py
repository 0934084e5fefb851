"""The callback: what each of Lightning's hooks means for the checkpoints."""

from __future__ import annotations

import functools
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.core.hooks import DataHooks

from checkpointing.commit.retention import RetentionOptions
from checkpointing.commit.tiers import DEFAULT_LOCAL_KEEP_LAST
from checkpointing.errors import CheckpointError, Preempted
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.host.environment import rank_settings
from checkpointing.lightning.data import FollowedLoaders
from checkpointing.lightning.loop_state import LightningLoopState, exported_in, saved_in, watched_in
from checkpointing.manager import rank_signals
from checkpointing.manager.manager import CheckpointManager
from checkpointing.manager.rehearsal import ends_rehearsal
from checkpointing.manager.step_protocol import Due
from checkpointing.snapshot.cadence import DEFAULT_OVERHEAD_CAP, Auto

logger = logging.getLogger("checkpointing")

# FSDPStrategy is FSDP1; DeepSpeedStrategy runs on GPUs only, and was never tried.
_UNSUPPORTED = {
    "FSDPStrategy": "FSDP1; use ModelParallelStrategy with fully_shard",
    "DeepSpeedStrategy": "not supported; use ModelParallelStrategy with fully_shard",
}
_TUNERS = ("LearningRateFinder", "BatchSizeFinder")
# What Lightning calls between drawing a batch and the first hook of its step.
_BEFORE_BATCH_START = ("on_before_batch_transfer", "on_after_batch_transfer")


class ResilientCheckpoint(Checkpoint):
    """Gives a Lightning `Trainer` fault-tolerant checkpoints.

    Nothing but this callback is needed: `fit` resumes from the newest valid checkpoint, in the middle of an epoch too,
    and the result is that of a run that was never interrupted. A checkpoint has the model, optimizers, schedulers,
    generators, the position in the data, the loops' progress, values logged since the epoch began, torchmetrics'
    metrics, and what callbacks and the data module return from `state_dict`, or add in `on_save_checkpoint`.

    A step is saved when everything of it is over, validation included: just before the next batch is trained on.

    Args:
        location: See `CheckpointManager`; default: `checkpoints` in the trainer's `default_root_dir`.
        save_steps: Optimizer steps between commits; "auto" chooses by measured cost. The last step is always committed.
        save_minutes: See `CheckpointManager`.
        snapshot_steps: See `CheckpointManager`.
        overhead_cap: See `CheckpointManager`.
        local_tier: See `CheckpointManager`.
        local_keep_last: See `CheckpointManager`.
        resume: "auto" (default), "never" or a step. A supervisor's choice takes precedence.
        memory_limit: See `CheckpointManager`.
        states: Further objects with `state_dict` and `load_state_dict`, by name.
        **retention: See `CheckpointManager`. Where `best_metric` is set, it is the name of a logged value, and each
            validation is followed by a commit.
    """

    def __init__(
        self,
        location: str | os.PathLike[str] | None = None,
        *,
        save_steps: int | Auto | None = None,
        save_minutes: float | None = None,
        snapshot_steps: int | Auto | None = "auto",
        overhead_cap: float = DEFAULT_OVERHEAD_CAP,
        local_tier: str | os.PathLike[str] | None = None,
        local_keep_last: int = DEFAULT_LOCAL_KEEP_LAST,
        resume: str | int | None = None,
        memory_limit: int | str | None = None,
        states: Mapping[str, Any] | None = None,
        **retention: Unpack[RetentionOptions],
    ) -> None:
        self._location, self._states, self._best_metric = location, dict(states or {}), retention.get("best_metric")
        self._options: dict[str, Any] = {
            "save_steps": save_steps,
            "save_minutes": save_minutes,
            "snapshot_steps": snapshot_steps,
            "overhead_cap": overhead_cap,
            "local_tier": local_tier,
            "local_keep_last": local_keep_last,
            "resume": resume,
            "memory_limit": memory_limit,
            **retention,
        }
        self._manager: CheckpointManager | None = None
        self._loop: LightningLoopState
        self._loaders: FollowedLoaders
        # The checkpoint that training resumes from, until its first batch is drawn.
        self._pending: LoadedCheckpoint | None = None
        self._due: Due | None = None
        self._global_step = 0
        self._metrics: dict[str, float] = {}
        self._handlers: dict[int, Any] = {}

    # -- the beginning and the end ---------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Go before all other callbacks: what they do in a hook for the next batch belongs to the next step."""
        trainer.callbacks = [self, *(callback for callback in trainer.callbacks if callback is not self)]
        self._others = [callback for callback in trainer.callbacks[1:] if isinstance(callback, Checkpoint)]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the newest checkpoint, if there is one.

        Raises:
            CheckpointError: The trainer is set up in a way that cannot be resumed exactly.
            NoValidCheckpoint: There are checkpoints, but none can be loaded.
        """
        if trainer.fast_dev_run:
            return
        _check(trainer)
        # There are none with Lightning: a run that counts on them is refused.
        rank_settings().virtual_ranks_of(None)
        location = self._location or f"{trainer.default_root_dir}/checkpoints"
        manager = self._manager = CheckpointManager(location, **self._options)
        self._loop = LightningLoopState(trainer, self)
        optimizer, *others = trainer.optimizers or [None]
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        manager.track(
            model=pl_module,
            optimizer=optimizer,
            scheduler=schedulers[0] if schedulers else None,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            states={
                **self._states,
                **{f"optimizer_{number}": other for number, other in enumerate(others, 1)},
                **{f"scheduler_{number}": other for number, other in enumerate(schedulers[1:], 1)},
                "lightning": self._loop,
            },
        )
        point = self._pending = manager.restoring.choose() or manager.restoring.starting_point()
        if point is not None:
            manager.restoring.restore_model(point)
            # Callbacks that rebuild the optimizer's parameter groups go by their own state, in their `on_fit_start`.
            manager.restoring.restore_states(point, {"lightning"})
            replace_restoring(trainer, functools.partial(self._restore_training, point))
        else:
            manager.restoring.load_initial_weights()
        self._loaders = FollowedLoaders(trainer, manager, manager.positions_in(point) if point is not None else [])
        self._due, self._metrics = None, {}
        self._handlers = {number: signal.getsignal(number) for number in rank_signals.SIGNALS}
        warn_of_draws(pl_module)

    def _restore_training(self, point: LoadedCheckpoint) -> None:
        assert self._manager is not None
        self._manager.restoring.restore_optimizer(point)
        if self._loop.ended:
            # A further epoch draws its order from these; the epoch that was drawn has its own, see `LoaderCursor`.
            self._manager.restoring.restore_rng(point)
            self._take_pending()

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Handle signals before anything takes long."""
        if self._manager is not None:
            _take_signals_back(trainer, self._handlers)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin training, once the loaders are there."""
        if self._manager is None:
            return
        self._loaders.check()
        _take_signals_back(trainer, self._handlers)
        self._loop.go_on()
        self._global_step = trainer.global_step
        script = self._manager.script
        script.is_in_trainer = True
        script.roots = lambda: watched_in(trainer, self)
        script.saved, script.exported = lambda: saved_in(trainer, self), lambda: exported_in(trainer, self)
        total = trainer.estimated_stepping_batches
        self._manager.begin(self._loop.step, int(total) if math.isfinite(total) else None)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Commit the last step."""
        manager = self._manager
        if manager is None:
            return
        self._loop.ended = True
        if self._loop.step:
            manager.save(self._loop.step, self._loop.step, metrics=self._metrics, wait=True)
        manager.finished = True
        self._let_go(trainer).close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave nothing in flight, where `fit` had no step to train."""
        if self._manager is not None and stage == "fit":
            self._manager.finished = True
            self._let_go(trainer).close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the trainer as it was. What is in memory is not waited for: other ranks may not have failed."""
        if self._manager is not None:
            if not isinstance(exception, SystemExit):
                self._manager.leave_training()
            self._let_go(trainer)
            if not isinstance(exception, Preempted):
                rank_signals.end_reading()

    def _let_go(self, trainer: Any) -> CheckpointManager:
        manager, self._manager = self._manager, None
        if "_loaders" in vars(self):  # Not after an error in an earlier hook.
            self._loaders.remove()
        self._take_pending()
        put_restoring_back(trainer)
        assert manager is not None
        return manager

    def __getattr__(self, name: str) -> Any:
        """Answer for `ModelCheckpoint`, as the first of the trainer's checkpoint callbacks is asked for its files."""
        others = vars(self).get("_others") or []
        if name.startswith("_") or not (others or name == "best_model_path"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(others[0], name) if others else ""

    # -- steps -----------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Announce the epoch whose batches are drawn next."""
        if self._manager is not None:
            self._loaders.begin_epoch(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Save the step before, of which now everything is over; or restore the generators of a resumed run.

        Raises:
            Preempted: After an agreed stop, once the state is committed.
        """
        if self._manager is None:
            return
        if self._pending is not None:
            self._manager.restoring.restore_rng(self._pending)
            self._loop.continue_logging()
            self._take_pending()
        self._save_if_due()
        self._manager.begin_step()
        self._manager.proving.batch(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Agree with all ranks on what is due, where the batch has ended an optimizer step."""
        if self._manager is None:
            return
        self._loaders.consume()
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            self._manager.proving.loss(loss)
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self._loop.step += 1
        self._metrics.clear()
        self._due = self._manager.end_of_step(self._loop.step)
        self._manager.record_step(self._loop.step, {}, self._due)
        if isinstance(loss, torch.Tensor) and self._loop.step % max(trainer.log_every_n_steps, 1) == 0:
            self._manager.report(self._loop.step, {"loss": loss.item()})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the end of the epoch: what follows it is not a step."""
        if self._manager is not None:
            self._loaders.end_epoch()
            self._manager.pause()

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Tell the watchdog that no step runs."""
        if self._manager is not None and not trainer.sanity_checking:
            self._manager.pause()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note the value by which the best checkpoint is chosen."""
        name = self._best_metric
        if self._manager is None or not name or trainer.sanity_checking:
            return
        if (value := trainer.callback_metrics.get(name)) is not None:
            self._metrics = {name: float(value)}

    def _save_if_due(self) -> None:
        manager, due, step = self._manager, self._due, self._loop.step
        self._due = None
        if manager is None or due is None:
            return
        is_last = ends_rehearsal(step)
        if due.stop or due.save or self._metrics or is_last:
            manager.save(step, step, metrics=self._metrics, wait=due.stop or is_last)
        elif due.snapshot:
            manager.save(step, step, commit=False)
        if due.stop:
            manager.stop(step)
        manager.end_rehearsal(step)

    def _take_pending(self) -> None:
        point, self._pending = self._pending, None
        if point is not None:
            point.close()


def _take_signals_back(trainer: Any, handlers: Mapping[int, Any]) -> None:
    """Undo what Lightning has made of the handlers.

    At a notice of preemption it would end training without a checkpoint and, in a run of several ranks, call a
    collective from its handler, in which the ranks that got no signal take no part.
    """
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)
    # One that came before has reached our handler, too.
    trainer._signal_connector.received_sigterm = False


def _check(trainer: Any) -> None:
    """Refuse what could not be resumed exactly."""
    strategy = type(trainer.strategy).__name__
    if strategy in _UNSUPPORTED:
        raise CheckpointError(f"ResilientCheckpoint cannot save Lightning's {strategy}: {_UNSUPPORTED[strategy]}")
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if started != trainer.world_size and "LOCAL_RANK" in os.environ:
        # On a CPU, "auto" is one device.
        raise CheckpointError(
            f"{started} processes were started (WORLD_SIZE), but the Trainer knows of {trainer.world_size}: pass "
            f"Trainer(devices={os.environ.get('LOCAL_WORLD_SIZE', started)}, num_nodes=...) with the launcher's numbers"
        )
    if tuners := [name for callback in trainer.callbacks if (name := type(callback).__name__) in _TUNERS]:
        raise CheckpointError(
            f"ResilientCheckpoint cannot train together with {tuners[0]}: tune in a script of its own"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise CheckpointError(
            "ResilientCheckpoint cannot resume Trainer(reload_dataloaders_every_n_epochs=...): a resumed run would "
            "make its loaders in other epochs. Let a sampler or data set with set_epoch change the data"
        )


def replace_restoring(trainer: Any, restore: Callable[[], None]) -> None:
    """Have Lightning restore the training state by `restore`, and nothing of what `fit(ckpt_path=...)` names.

    It calls that after the callbacks' `on_fit_start`, where some rebuild the optimizer's parameter groups.
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
