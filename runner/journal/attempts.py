"""What a node is asked to do, and how that ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from runner.journal.events import AttemptEnded, AttemptStarted
from runner.program.program import Program
from runner.recovery.failure import Failure

# Nodes receive an attempt's specification from the network.
Count = Annotated[int, Field(ge=0, lt=2**53)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]
Text = Annotated[str, Field(max_length=10_000)]


@dataclass(frozen=True)
class Job:
    """What to run.

    Attributes:
        program: What the ranks run; None for the configured job.
        show_output: Whether to show what the ranks print.
        resume_from: A checkpoint to start from while the run has none of its own.
        allow_changes: Whether to resume from checkpoints of a job that differs from this one.
    """

    program: Program | None = None
    show_output: bool = False
    resume_from: str = ""
    allow_changes: bool = False


@dataclass(frozen=True)
class AttemptSpec:
    """What an attempt is to be, on every node.

    Attributes:
        attempt: Its number, from 1.
        nnodes: Nodes of the attempt.
        divisor: Parts that micro-batches are divided into.
        skipped: Windows of steps that are skipped, as text: "41-45,60-60".
        failure_history: "FAILURES:SECONDS" of the run so far.
        lineage: See `RestartState`, also for `lost_steps` and `reached`.
        resume_from: See `Job`, also for `allow_changes`; nodes that were given none use the leader's value.
        max_nodes: Nodes that the run may have; 0 for `nnodes`.
        held: Whether some node that takes part may hold the newest snapshot: others need not read it from storage.
        leader: Node rank of the leader, where the ranks of all nodes meet.
        leader_host: Its address; empty for that of the first node, as configured.
        nodes: Node ranks of those that take part, if the run may have several.
        planned_ranks: Ranks that the configured batch and learning rate are meant for; 0 for those of the attempt.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="ignore")

    attempt: Count
    nnodes: Positive
    divisor: Positive = 1
    skipped: Text = ""
    failure_history: Text = "0:0"
    lineage: Text = ""
    lost_steps: Count = 0
    reached: Count = 0
    resume_from: Text = ""
    allow_changes: bool = False
    max_nodes: Count = 0
    planned_ranks: Count = 0
    held: bool = False
    leader: Count = 0
    leader_host: Annotated[str, Field(max_length=300)] = ""
    nodes: Annotated[tuple[Count, ...], Field(max_length=100_000)] = ()

    @property
    def run_nodes(self) -> int:
        """Nodes that the run may have."""
        return self.max_nodes or self.nnodes

    def started(self, launcher_pid: int, agent_pid: int) -> AttemptStarted:
        """Return the journal's event."""
        return AttemptStarted(
            nnodes=self.nnodes,
            nodes=list(self.nodes),
            max_nodes=self.max_nodes,
            launcher_pid=launcher_pid,
            agent_pid=agent_pid,
        )


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended on this node. Times are seconds since the epoch.

    Attributes:
        start_step: Step that it started from.
        training_began: When its first step began; 0 if it did not come so far.
        last_step_at: Likewise, when its last finished step ended.
        failed_at: The first sign of a failure; 0 if there was none.
        log: File with the standard error of the rank that failed; None if there is none.
        used_manager: Whether some rank used a checkpoint manager.
    """

    failure: Failure
    start_step: int = 0
    training_began: float = 0.0
    last_step_at: float = 0.0
    failed_at: float = 0.0
    log: Path | None = None
    used_manager: bool = False

    def event(self, failure: Failure, committed_step: int) -> AttemptEnded:
        """Return the journal's event: the failure is that of all nodes, and the step -1 if nothing is committed."""
        return AttemptEnded(
            kind=failure.kind.value,
            cause=failure.cause,
            rank=failure.rank,
            step=failure.step,
            start_step=self.start_step,
            training_began=self.training_began,
            last_step_at=self.last_step_at,
            failed_at=0.0 if failure.kind.is_orderly else self.failed_at,
            committed_step=committed_step,
        )
