"""Uploads to the Hugging Face Hub during training: of what is committed, in the background."""

from __future__ import annotations

import copy
import functools
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import TrainerState
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress

from checkpointing.host.threads import in_background

logger = logging.getLogger("checkpointing")

# In the output folder; a name that the Trainer does not upload.
_FOLDER = "_hub"


class HubPushes:
    """What `push_to_hub` uploads at a save, once that is committed.

    A stock Trainer uploads the folder that it has just written. Here the checkpoint is read from storage for that, in a
    thread, and the Trainer's own code uploads it from there. Nothing of this fails or delays a step.

    Args:
        trainer: A resilient trainer; its manager changes with each call of `train`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._current: Future[None] | None = None
        # Step of the last checkpoint that was to be uploaded.
        self._newest = 0
        self._has_warned = False

    @property
    def are_wanted(self) -> bool:
        """Whether this rank pushes checkpoints."""
        args = self._trainer.args
        return bool(args.push_to_hub and args.hub_strategy != HubStrategy.END and self._trainer.is_world_process_zero())

    def push(self, state: TrainerState) -> None:
        """Begin to upload the checkpoint of a state; all ranks call this, and one acts.

        Of those that wait for an upload to end, only the newest is uploaded, without `hub_always_push`. A stock Trainer
        leaves out them all, and may so leave the last one out.
        """
        trainer, args, earlier = self._trainer, self._trainer.args, self._current
        if not self.are_wanted:
            return
        if trainer._session.stopping:
            # A stop does not wait for uploads.
            return
        trainer.callback_handler.on_push_begin(args, state, trainer.control)
        folder = Path(args.output_dir, _FOLDER)
        manager, step = trainer._manager, state.global_step
        self._newest = step
        export = functools.partial(manager.restoring.export, step, folder / f"checkpoint-{step}")
        work = functools.partial(
            self._upload,
            _uploader(trainer, state, folder / "model"),
            folder,
            export,
            list(manager.static_files),
            earlier,
        )
        self._current = in_background(work, "hub-push")
        # The Trainer waits for it at the end of training, and before it pushes the final model.
        trainer.push_in_progress = PushInProgress([self._current])

    def _upload(
        self,
        uploader: Any,
        folder: Path,
        export: Callable[[], None],
        static_files: list[str],
        earlier: Future[None] | None,
    ) -> None:
        if earlier is not None:
            wait([earlier])
        if uploader.state.global_step != self._newest and not uploader.args.hub_always_push:
            return
        try:
            # What a process has left that did not live to remove it.
            shutil.rmtree(folder, ignore_errors=True)
            export()
            checkpoint, model = folder / f"checkpoint-{uploader.state.global_step}", Path(uploader.args.output_dir)
            model.mkdir()
            for name in static_files:
                shutil.copy(checkpoint / name, model / name)
            uploader._push_from_checkpoint(str(checkpoint))
            for job in uploader.push_in_progress.jobs:
                job.result()
        except Exception as error:
            self._warn(error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a checkpoint was not pushed to the Hub (%s: %s); training continues, and the next one is tried. Check "
                "the token and the network; trainer.push_to_hub() pushes the final model",
                type(error).__name__,
                error,
            )


def _uploader(trainer: Any, state: TrainerState, model: Path) -> Any:
    """Return a copy of a trainer that uploads another folder than the output folder, while the original trains."""
    uploader = copy.copy(trainer)
    uploader.args, uploader.state = copy.copy(trainer.args), state
    uploader.args.output_dir = str(model)
    # Its files are among the checkpoint's; a tokenizer cannot be used in two threads.
    uploader.processing_class = None
    uploader.callback_handler = SimpleNamespace(on_push_begin=lambda *_: None)
    uploader.push_in_progress = None
    return uploader
