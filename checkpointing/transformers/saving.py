"""Overrides of what a trainer writes into a checkpoint, and reads from it."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from checkpointing.errors import Preempted
from checkpointing.format.layout import TRAINER_STATE_NAME, loop_state_name
from checkpointing.manager.manager import CheckpointManager
from checkpointing.manager.rehearsal import ends_rehearsal
from checkpointing.process import rng
from checkpointing.snapshot.request import SmallFile
from checkpointing.state.adapter import Adapter
from checkpointing.transformers.callback import CommitNotices, outside_steps
from checkpointing.transformers.further_states import export_states, further_states, restore_states
from checkpointing.transformers.loop_state import JobRecord, LoopState, evaluated_metrics, state_file
from checkpointing.transformers.train_call import ResilientOptions, TrainCall
from checkpointing.transformers.wrapped_models import configuration_files, set_batch_shape, tracked_model

logger = logging.getLogger("checkpointing")

# Overrides in these packages add nothing that a checkpoint needs: TRL's write a model card.
_KNOWN_PACKAGES = ("transformers.", "trl.", "checkpointing.")
_SAVING_METHODS = ("_save_checkpoint", "save_model", "_save")
# Files that a stock Trainer writes, and that a checkpoint holds already.
_STOCK_FILES = re.compile(
    r"(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)|model\.safetensors\.index\.json|"
    r"pytorch_model\.bin\.index\.json|optimizer\.(pt|bin)|scheduler\.pt|scaler\.pt|rng_state(_\d+)?\.pth|"
    r"trainer_state\.json|training_args\.bin"
)

# At run time the mixin stands in front of the trainer's own class; only the type checker needs a base.
_Base: Any = Trainer if TYPE_CHECKING else object


def _show_files(output_dir: Path, folder: Path) -> None:
    """Let what a program has written to its output folder be found in another one: ms-swift copies its arguments."""
    with contextlib.suppress(OSError):
        for path in output_dir.absolute().iterdir():
            if path.is_file():
                (folder / path.name).symlink_to(path)


class SavingMixin(_Base):
    """Saves and restores through a `CheckpointManager` in place of the Trainer's own files."""

    # Both of the present training.
    _manager: CheckpointManager
    _session: TrainCall
    _options: ResilientOptions
    # What is saved of a PEFT model; None for other models.
    _adapter: Adapter | None
    _notices: CommitNotices
    # Where a script's overrides of saving methods write; None if none runs now.
    _staging: str | None = None

    def _track(self) -> None:
        """Pass the manager what is saved; the Trainer replaces some of it as training begins."""
        self._manager.track(
            model=tracked_model(self),
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            scaler=getattr(self.accelerator, "scaler", None),
            states=self._further_states(),
            adapter=self._adapter,
        )

    def _further_states(self) -> dict[str, Any]:
        return further_states(self) | dict(self._options.states)

    # -- saving --------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._staging is not None:
            # The script's override calls it a second time.
            super()._save_checkpoint(model, trial)
            return
        if not self._manager.wants(self.state.global_step):
            return
        added: dict[str, bytes] = {}
        if overrides_saving(type(self)):
            with outside_steps(self), self._staged() as folder:
                super()._save_checkpoint(model, trial)
                added = added_files(folder)
        self._snapshot(commit=True, added=added)

    @contextlib.contextmanager
    def _staged(self) -> Iterator[Path]:
        """Direct what the trainer writes into a folder that is never resumed from, and take back what it changes.

        Yields the folder of the checkpoint. It exists on all ranks, as those that write nothing may look into it, too.
        """
        args, state = self.args, self.state
        callbacks, output_dir = state.stateful_callbacks, args.output_dir
        with tempfile.TemporaryDirectory(prefix="checkpoint-staging-", dir=self._manager.scratch) as folder:
            self._staging = args.output_dir = folder
            checkpoint = Path(folder, f"checkpoint-{state.global_step}")
            checkpoint.mkdir()
            _show_files(Path(output_dir), Path(folder))
            state.stateful_callbacks = copy.deepcopy(callbacks)
            try:
                yield checkpoint
            finally:
                self._staging, args.output_dir = None, output_dir
                state.stateful_callbacks = callbacks

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; a callback may ask for it in the middle of training."""
        with outside_steps(self):
            return super().evaluation_loop(*args, **kwargs)

    def _get_output_dir(self, trial: Any) -> str:
        return self._staging or str(super()._get_output_dir(trial))

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

    def _snapshot(self, *, commit: bool, added: Mapping[str, bytes] | None = None) -> None:
        """Take a snapshot of the present step, unless there is one that is as durable; `added` are files by name.

        Where training stops on request, this raises Preempted once the snapshot is committed.
        """
        manager, session, step = self._manager, self._session, self.state.global_step
        if not manager.wants(step, commit=commit):
            return
        if commit:
            self.store_flos()
        # As the Trainer does before it saves.
        self.state.stateful_callbacks |= export_states([*self.callback_handler.callbacks, self.control])
        self._track()
        own: dict[str, SmallFile] = {loop_state_name(self.args.process_index): self._loop_state().to_bytes}
        own |= added or {}
        shared: dict[str, SmallFile] = {}
        if self.args.local_process_index == 0:
            if not manager.static_files:
                manager.static_files = configuration_files(self)
            shared[TRAINER_STATE_NAME] = state_file(self.state)
        # The best step is loaded at the end: like the last one, it must not be skipped because memory is busy.
        is_best = self.args.load_best_model_at_end and commit and step == self.state.best_global_step
        manager.save(
            step,
            step * session.data.layout.samples_per_step,
            own,
            shared,
            metrics=evaluated_metrics(self.state),
            wait=session.stopping or step >= self.state.max_steps or is_best or ends_rehearsal(step),
            commit=commit,
            generators=session.evaluation.before if session.stopping else None,
        )
        if session.stopping:
            try:
                manager.stop(step)
            except Preempted:
                self._notices.notify_all()
                raise

    def _loop_state(self) -> LoopState:
        session, start = self._session, self._session.start
        stream = session.data.stream
        record = JobRecord(
            layout=session.data.layout,
            job=session.job,
            stream=stream.position if stream is not None else None,
            # By a callback. A stop on request is not one, and after the last step there may be more next time.
            ended=self.control.should_training_stop
            and not session.stopping
            and self.state.global_step < self.state.max_steps,
            # Two runs differ in it. Where a supervisor knows it, checkpoints of equal runs stay equal.
            run_name=start.run_name if session.has_trackers and not start.is_supervised else None,
        )
        return LoopState.capture(
            self,
            session.figures,
            record=record,
            evaluation_due=session.stopping and session.evaluation.before is not None,
            recent_losses=session.guard.recent_losses,
        )

    # -- restoring -----------------------------------------------------------------------------------------------

    def _load_callback_state(self) -> None:
        """Always, where this run is resumed; `restore_callback_states_from_checkpoint` is for other starts."""
        point = self._session.start.point
        if point is None:
            super()._load_callback_state()
            return
        with point.reading(TRAINER_STATE_NAME):
            restore_states(self.callback_handler.callbacks, self.state.stateful_callbacks)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Prepare model and optimizer; with DeepSpeed, load our checkpoint where the Trainer would look for its own."""
        point = self._session.start.point
        set_batch_shape(self)
        if point is None or not self.is_deepspeed_enabled:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        self._track()
        self._manager.restoring.restore_model(point)
        self._manager.restoring.restore_optimizer(point)
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        point = self._session.start.point
        if point is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        self._track()
        self._manager.restoring.restore_model(point)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        point = self._session.start.point
        if point is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self._track()
        self._manager.restoring.restore_optimizer(point)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._session.start.point is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The Trainer calls it where an epoch begins, or once the first batch of a resumed one is drawn."""
        session, point = self._session, self._session.start.point
        if point is None:
            super()._load_rng_state(checkpoint)
        elif session.evaluation.after is not None:
            rng.set_state(session.evaluation.after)
        elif session.data.stream is None:
            self._manager.restoring.restore_rng(point)


# -- a script's overrides of these methods, for the files that they add ----------------------------------------------


def overrides_saving(cls: type) -> bool:
    """Return whether a class of the script overrides what is saved."""
    return any(
        name in vars(base) and not (base.__module__ + ".").startswith(_KNOWN_PACKAGES)
        for base in cls.__mro__
        for name in _SAVING_METHODS
    )


def added_files(folder: Path) -> dict[str, bytes]:
    """Return the files in a folder, by their path in it, that a checkpoint would not hold by itself."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = ((path.relative_to(folder).as_posix(), path) for path in paths)
    return {name: path.read_bytes() for name, path in names if not _STOCK_FILES.fullmatch(name)}
