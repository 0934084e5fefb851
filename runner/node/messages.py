"""What a node is asked to do, and how it went."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from checkpointing.agent.protocol import Message
from runner.recovery.kinds import Failure, FailureKind


@dataclass(frozen=True)
class Job:
    """What to run: the default job, or a script of the user's; whether what its ranks print is shown.

    Attributes:
        resume_from: A checkpoint to start from while the run has none of its own.
        allow_changes: Checkpoints of a job that differs from this one are resumed from.
    """

    script: str | None = None
    args: tuple[str, ...] = ()
    show_output: bool = False
    resume_from: str = ""
    allow_changes: bool = False


@dataclass(frozen=True)
class AttemptSpec:
    """What an attempt is to be like, on every machine.

    Attributes:
        divisor: into how many parts micro-batches are cut.
        skipped: windows of steps that are passed over, as `checkpointing.rank.spikes.SkippedSteps` reads them.
        failure_history: "FAILURES:SECONDS" of the run so far.
        lineage, lost_steps, reached: see `RunRecord`.
        resume_from, allow_changes: See `Job`; the first node's count for nodes that were not given their own.
    """

    attempt: int
    nnodes: int
    divisor: int = 1
    skipped: str = ""
    failure_history: str = "0:0"
    lineage: str = ""
    lost_steps: int = 0
    reached: int = 0
    resume_from: str = ""
    allow_changes: bool = False

    def to_message(self) -> Message:
        return asdict(self)

    @classmethod
    def from_message(cls, message: Message) -> AttemptSpec:
        return cls(**{own.name: message[own.name] for own in fields(cls)})


# Ends that are no failures.
_ORDERLY = (FailureKind.FINISHED, FailureKind.PREEMPTED)


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt went on this machine.

    Attributes:
        start_step: step that it started from.
        training_began, last_step_at: seconds since the epoch; 0 where it did not come so far.
        failed_at: likewise, the first sign of a failure; 0 where there was none.
        log: what the rank that failed had written to its standard error.
        used_manager: some rank has made a checkpoint manager.
    """

    failure: Failure
    start_step: int = 0
    training_began: float = 0.0
    last_step_at: float = 0.0
    failed_at: float = 0.0
    log: Path | None = None
    used_manager: bool = False

    def event(self, failure: Failure, committed_step: int) -> dict[str, Any]:
        """What the journal keeps of it; `failure` is that of all machines."""
        return {
            "kind": failure.kind.value,
            "cause": failure.cause,
            "rank": failure.rank,
            "step": failure.step,
            "start_step": self.start_step,
            "training_began": self.training_began,
            "last_step_at": self.last_step_at,
            "failed_at": self.failed_at if failure.kind not in _ORDERLY else 0.0,
            "committed_step": committed_step,
        }
