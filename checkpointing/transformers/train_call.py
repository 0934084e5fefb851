"""One call of `train`: what it was asked for, where it starts, and what it keeps besides the Trainer's own state."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from checkpointing.data.dealing import StepLayout
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.format.layout import TRAINER_STATE_NAME
from checkpointing.manager.restoring import Restoring
from checkpointing.manager.step_protocol import Due
from checkpointing.resume.agreement import own_checkpoint
from checkpointing.resume.verified_read import read_checkpoint
from checkpointing.transformers.callback import InterruptibleEvaluation, Throughput
from checkpointing.transformers.data import TrainingData
from checkpointing.transformers.guards import SkippedLoss, StepGuard
from checkpointing.transformers.job_shape import DataRanks, can_be_uneven
from checkpointing.transformers.loop_state import JobRecord, LoopFigures, checked_directory

_ID_LENGTH = 16


@dataclass(frozen=True)
class ResilientOptions:
    """Options of `resilient`, as far as training needs them."""

    states: Mapping[str, Any] = field(default_factory=dict)
    # Number of parts into which each micro-batch is cut.
    divisor: int = 1
    # Commits are made when they are worth their price, not when the Trainer wants to save.
    saves_by_price: bool = False
    check_finite: bool = True
    spike_zscore: float | None = None
    seekable_stream: bool = False
    shuffle_samples: int | None = None
    # 0 for none.
    virtual_ranks: int = 0
    # Keep sums of virtual ranks' gradients in the host's memory.
    on_host: bool = False


@dataclass
class Start:
    """Where a training starts: this run's newest checkpoint, a checkpoint of another run, or the beginning."""

    # A checkpoint of this library; None at the beginning, and for a stock Trainer's checkpoint.
    point: LoadedCheckpoint | None = None
    # What `Trainer.train` gets as `resume_from_checkpoint`.
    folder: str | bool | None = None
    # What trackers call the run: letters and digits. Where a supervisor knows it, checkpoints need not hold it.
    run_name: str = ""
    is_supervised: bool = False
    # What the checkpoint says of its job.
    record: JobRecord | None = None

    def __post_init__(self) -> None:
        # Until the first batch of the resumed run is drawn.
        self.pending = self.point

    @property
    def step(self) -> int:
        """Number of steps that were done before; 0 where a stock Trainer's checkpoint does not say."""
        if self.point is not None:
            return self.point.step
        try:
            with (Path(str(self.folder)) / TRAINER_STATE_NAME).open() as file:
                return int(json.load(file)["global_step"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    @property
    def had_ended(self) -> bool:
        """Whether a callback had ended training when the checkpoint to be restored was made."""
        return self.pending is not None and self.record is not None and self.record.ended

    def finished_notice(self, max_steps: int, job: Mapping[str, str | None]) -> str | None:
        """Return what to say of a training that has no step left, before its first batch; None if it has some."""
        if self.point is None or not (self.had_ended or self.step >= max_steps):
            return None
        by_callback = f", of {max_steps}: a callback had ended it" if self.step < max_steps else ""
        notice = (
            f"training had finished already, at step {self.step}{by_callback} ({self.point.label}); no step is left"
        )
        before = self.record.job if self.record is not None else {}
        if None in (before.get("training data"), job.get("training data")):
            notice += (
                ". Whether it was on the same data is not known, as rows of this kind of data set are not looked at"
            )
        return f"{notice}. Other data needs another output_dir"


def choose_start(restoring: Restoring, args: Any, asked: str | bool | None, lineage: str = "") -> Start:
    """Agree with all ranks on where to start; called by every rank.

    What the script has `asked` for as `resume_from_checkpoint` counts while the run has no checkpoint of its own. The
    `lineage` is a supervisor's name of the run, the same in every attempt; empty without a supervisor.
    """
    # FSDP2 moves the model to the device only later.
    point = restoring.choose(on_device=args.device.type != "cpu")
    run_name = _run_name(lineage, restoring.stage_name, JobRecord.read(point) if point is not None else None)
    folder: str | bool | None = None
    if point is None:
        folder = asked or restoring.starting_folder
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


@dataclass
class TrainCall:
    """The state of one training; another call of `train` gets a new one."""

    data: TrainingData
    guard: StepGuard
    evaluation: InterruptibleEvaluation
    throughput: Throughput
    start: Start = field(default_factory=Start)
    figures: LoopFigures = field(default_factory=LoopFigures)
    skipped_loss: SkippedLoss = field(default_factory=SkippedLoss)
    # See `job_of`.
    job: Mapping[str, str | None] = field(default_factory=dict)
    has_trackers: bool = False
    # What all ranks have agreed on for the step that has just ended.
    due: Due = field(default_factory=Due)
    # The last one that the step record has.
    recorded_step: int = 0
    # All ranks have agreed to stop.
    stopping: bool = False
    # No step has ended since the end of an epoch.
    epoch_is_over: bool = False
    # The loop has ended.
    is_finalizing: bool = False

    @classmethod
    def of(cls, trainer: Any, layout: StepLayout) -> TrainCall:
        """Return that of a resilient trainer whose training is about to start; a run that begins now has `layout`."""
        manager, options, args, ranks = trainer._manager, trainer._options, trainer.args, DataRanks.of(trainer)
        return cls(
            data=TrainingData(
                manager,
                args,
                layout=layout,
                ranks=ranks,
                beginning=trainer._beginning,
                shuffle_samples=options.shuffle_samples,
                uneven=can_be_uneven(trainer),
            ),
            guard=StepGuard(
                check_finite=options.check_finite, spike_zscore=options.spike_zscore, world_size=args.world_size
            ),
            evaluation=InterruptibleEvaluation(manager, args.world_size),
            throughput=Throughput(ranks.count),
        )
