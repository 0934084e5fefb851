"""Where a training starts: this run's newest checkpoint, a checkpoint of another run, or the beginning."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers.trainer_utils import get_last_checkpoint

from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.resume.agreement import own_checkpoint
from checkpointing.resume.verified_read import read_checkpoint
from checkpointing.transformers.loop_state import JobRecord
from checkpointing.transformers.trainer_state import TRAINER_STATE_NAME, checked_directory

_ID_LENGTH = 16


class Chooser(Protocol):
    """The part of a manager's `Restoring` that knows where a run can start."""

    @property
    def starting_folder(self) -> str | None:
        """Checkpoint of another run that the user wants to start from."""

    @property
    def stage_name(self) -> str:
        """Name of a supervised run's later trainings; empty for its first one."""

    def choose(self, *, on_device: bool | None = None) -> LoadedCheckpoint | None:
        """Agree with all ranks on the checkpoint to resume from."""


@dataclass
class Start:
    """Where a training starts.

    Attributes:
        point: A checkpoint of this library; None at the beginning, and for a stock Trainer's checkpoint.
        folder: What `Trainer.train` gets as `resume_from_checkpoint`.
        run_name: What trackers call the run: letters and digits.
        is_supervised: A supervisor knows the run's name, so that checkpoints need not hold it.
        record: What the checkpoint says of its job.
        pending: `point`, until the first batch of the resumed run is drawn.
    """

    point: LoadedCheckpoint | None = None
    folder: str | bool | None = None
    run_name: str = ""
    is_supervised: bool = False
    record: JobRecord | None = None
    pending: LoadedCheckpoint | None = None

    def __post_init__(self) -> None:
        """Everything of the point is still to be restored."""
        self.pending = self.point

    @property
    def step(self) -> int:
        """Number of steps that were done before."""
        return self.point.step if self.point is not None else _step_of(self.folder)

    @property
    def had_ended(self) -> bool:
        """Whether a callback had ended training when the checkpoint to be restored was made."""
        return self.pending is not None and self.record is not None and self.record.ended

    def take_pending(self) -> LoadedCheckpoint | None:
        """Return `pending`, once."""
        pending, self.pending = self.pending, None
        return pending


def choose_start(chooser: Chooser, args: Any, asked: str | bool | None, lineage: str = "") -> Start:
    """Agree with all ranks on where to start; called by every rank.

    Args:
        chooser: Knows this run's checkpoints: the `restoring` of a `CheckpointManager`.
        args: The trainer's `TrainingArguments`.
        asked: `resume_from_checkpoint` as the script passes it; counts while the run has no checkpoint of its own.
        lineage: A supervisor's name of the run, the same in every attempt; empty without a supervisor.

    Raises:
        CheckpointError: There are checkpoints, but none can be used.
    """
    # FSDP2 moves the model to the device only later.
    point = chooser.choose(on_device=args.device.type != "cpu")
    run_name = _run_name(lineage, chooser.stage_name, JobRecord.read(point) if point is not None else None)
    folder: str | bool | None = None
    if point is None:
        folder = asked or chooser.starting_folder
        if folder is True:
            folder = get_last_checkpoint(args.output_dir) or True
        found = own_checkpoint(Path(folder)) if isinstance(folder, (str, os.PathLike)) else None
        if found is not None:
            private = args.device.type == "cpu"
            point = read_checkpoint(*found, args.process_index, args.world_size, private=private)
    if point is None:
        return Start(None, folder or None, run_name, bool(lineage))
    return Start(point, checked_directory(point), run_name, bool(lineage), JobRecord.read(point))


def _run_name(lineage: str, stage: str, record: JobRecord | None) -> str:
    """Return the run's name: a supervisor knows it from the first attempt on, otherwise the run's checkpoints do."""
    if lineage:
        return hashlib.sha256(f"{lineage}/{stage}".encode()).hexdigest()[:_ID_LENGTH]
    if record is not None and record.run_name is not None:
        return record.run_name
    return uuid.uuid4().hex[:_ID_LENGTH]


def _step_of(folder: str | bool | None) -> int:
    """Return the step of a stock Trainer's checkpoint; 0 if there is none to start from."""
    try:
        with (Path(str(folder)) / TRAINER_STATE_NAME).open() as file:
            return int(json.load(file)["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
