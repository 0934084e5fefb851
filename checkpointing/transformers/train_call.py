"""What one call of `train` keeps besides the Trainer's own state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from checkpointing.data.dealing import StepLayout
from checkpointing.manager.manager import CheckpointManager
from checkpointing.manager.step_protocol import Due
from checkpointing.transformers.data import TrainingData
from checkpointing.transformers.data_ranks import DataRanks
from checkpointing.transformers.evaluation import InterruptibleEvaluation
from checkpointing.transformers.guards import SkippedLoss, StepGuard
from checkpointing.transformers.loop_state import LoopFigures
from checkpointing.transformers.options import ResilientOptions
from checkpointing.transformers.starting_point import Start
from checkpointing.transformers.uneven import can_be_uneven


@dataclass
class TrainCall:
    """The state of one training; another call of `train` gets a new one.

    Attributes:
        data: The loader, and the position in it.
        guard: Judges steps before anything of them is kept.
        evaluation: Lets evaluations be cut short.
        throughput: Tokens per second.
        start: Where training started.
        figures: What the Trainer counts per process instead of per run.
        skipped_loss: Stands in for the loss of skipped steps.
        job: What identifies the job, see `job_of`.
        has_trackers: A callback reports to a tracker.
        due: What all ranks have agreed on for the step that has just ended.
        stopping: All ranks have agreed to stop.
        is_finalizing: The loop has ended.
        uncovered: Digests of what could change without being saved, as training began; None once they were compared.
    """

    data: TrainingData
    guard: StepGuard
    evaluation: InterruptibleEvaluation
    throughput: Throughput
    start: Start = field(default_factory=Start)
    figures: LoopFigures = field(default_factory=LoopFigures)
    skipped_loss: SkippedLoss = field(default_factory=SkippedLoss)
    job: Mapping[str, str | None] = field(default_factory=dict)
    has_trackers: bool = False
    due: Due = field(default_factory=Due)
    stopping: bool = False
    is_finalizing: bool = False
    uncovered: dict[str, str] | None = None

    @classmethod
    def create(
        cls,
        trainer: Any,
        manager: CheckpointManager,
        options: ResilientOptions,
        layout: StepLayout,
        beginning: Mapping[str, Any] | None,
    ) -> TrainCall:
        """Create the session of a training that is about to start.

        Args:
            trainer: The trainer.
            manager: The training's checkpoints.
            options: Of `resilient`.
            layout: How steps are divided if the run begins now.
            beginning: State of a seekable stream at the beginning of an epoch; None for other data.
        """
        args, ranks = trainer.args, DataRanks.of(trainer)
        return cls(
            data=TrainingData(
                manager,
                args,
                layout=layout,
                ranks=ranks,
                beginning=beginning,
                shuffle_samples=options.shuffle_samples,
                uneven=can_be_uneven(trainer),
            ),
            guard=StepGuard(
                check_finite=options.check_finite, spike_zscore=options.spike_zscore, world_size=args.world_size
            ),
            evaluation=InterruptibleEvaluation(manager, args.world_size),
            throughput=Throughput(ranks.count),
        )

    def take_due(self) -> Due:
        """Return `due`, once."""
        due, self.due = self.due, Due()
        return due


class Throughput:
    """Counts token ids, and computes the rate between two log entries."""

    def __init__(self, num_ranks: int = 1) -> None:
        """Assume that every data parallel rank, of which there are `num_ranks`, has as many tokens as this one."""
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
