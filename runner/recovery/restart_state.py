"""What the next runner of a run must know, on any node; the agent keeps it with the checkpoints."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checkpointing.host import locking
from runner.recovery.failure import Failure, Window, read_window
from runner.recovery.kinds import FailureKind
from runner.recovery.policy import WHOLE_BATCHES, AttemptRecord, BatchDivision
from runner.system import processes

# Failures without a new checkpoint between them that are kept; more than any budget.
_MAX_FAILURES = 100
# Seconds that a node waits for others before it checks whether the job has finished without it.
FINISHED_PATIENCE_S = 30.0


@dataclass(frozen=True)
class RunnerProcess:
    """A runner, identified by its node, its process id and its start."""

    host: str  # Identity of the node's current boot.
    pid: int  # Process id.
    # Clock ticks from the node's boot to the process's start: process ids are reused, but not at the same tick.
    started: int

    @classmethod
    def current(cls) -> RunnerProcess:
        """Return this process."""
        pid = os.getpid()
        return cls(locking.this_machine(), pid, processes.start_ticks(pid) or 0)

    @property
    def is_alive_here(self) -> bool:
        """Whether it is running on this node and is not this process."""
        here = self.host == locking.this_machine() and self.pid != os.getpid()
        return here and processes.start_ticks(self.pid) == self.started

    @property
    def is_gone_here(self) -> bool:
        """Whether it ran on this node and has ended."""
        return self.host == locking.this_machine() and processes.start_ticks(self.pid) != self.started

    @classmethod
    def from_dict(cls, body: Any) -> RunnerProcess | None:
        """Parse a JSON object; returns None if it is something else: older versions recorded none."""
        try:
            host, pid, started = body["host"], body["pid"], body["started"]
        except (KeyError, TypeError):
            return None
        if not isinstance(host, str) or type(pid) is not int or type(started) is not int or not 0 < pid < 2**31:
            return None
        return cls(host, pid, started)


def process_namespace() -> str:
    """Return the PID namespace, within which process ids are unique (pid_namespaces(7))."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


@dataclass
class RestartState:
    """Failures since the last newly committed step, and how batches are divided."""

    history: list[AttemptRecord] = field(default_factory=list)  # Failures, oldest first.
    batch: BatchDivision = WHOLE_BATCHES  # How batches are divided.
    # The attempt that is running; None between two attempts. A runner that reads one here follows a runner that
    # exited without reporting.
    running: int | None = None
    skipped: list[Window] = field(default_factory=list)  # Windows of steps that are skipped.
    reached: int = 0  # The newest step that the last attempt which trained has finished.
    lost_steps: int = 0  # Steps that have been recomputed, as far as a runner was alive to see it.
    # Id of the run's first session that kept this state: the same on every node that continues the run.
    lineage: str = ""
    runner: RunnerProcess | None = None  # The runner that wrote it last.
    # The job that has run to its end, with all of it durable (`identity.key_of`); empty before that, and while a
    # longer training continues it.
    finished: str = ""

    def add(self, record: AttemptRecord) -> None:
        """Add a failure, and forget those before a newly committed step.

        The last of them stays: the snapshots of a failed attempt are committed, and its failure may still repeat.
        """
        if self.history and self.history[-1].committed_step != record.committed_step:
            del self.history[:-1]
        self.history = [*self.history, record][-_MAX_FAILURES:]

    def history_with(self, failure: Failure | None, committed_step: int) -> list[AttemptRecord]:
        """Return the failures with the newest end, unless it is None or recorded as one of them."""
        if failure is None or (self.history and self.history[-1].failure is failure):
            return list(self.history)
        return [*self.history, AttemptRecord(failure, committed_step)]

    def account_for_steps(self, first: int, last: int) -> None:
        """Count the steps that an attempt recomputed, which started from one step and finished another one last."""
        self.lost_steps += max(self.reached - first, 0)
        self.reached = last

    def account_for_lost_runner(self, committed_step: int) -> bool:
        """Add a failure if the runner before this one was killed together with its attempt; returns whether it was."""
        if self.running is None:
            return False
        cause = f"attempt {self.running} ended together with its runner"
        self.add(AttemptRecord(Failure(FailureKind.RUNNER_LOST, cause), committed_step))
        self.running = None
        return True

    def to_json(self, attempt: int) -> str:
        """Return the state as JSON; that of an older attempt does not replace that of a newer one."""
        history = [{"failure": r.failure.to_dict(), "committed_step": r.committed_step} for r in self.history]
        body = {"attempt": attempt, "history": history, "batch": asdict(self.batch), "running": self.running}
        body |= {"skipped": self.skipped, "lineage": self.lineage, "finished": self.finished}
        body |= {"reached": self.reached, "lost_steps": self.lost_steps}
        body |= {"runner": asdict(self.runner)} if self.runner is not None else {}
        return json.dumps(body)

    @classmethod
    def from_json(cls, data: bytes | str | None) -> RestartState:
        """Parse what `to_json` returned; anything else is an empty state.

        Losing the state costs a few more restarts; refusing to start would cost the run.
        """
        try:
            body = json.loads(data or "{}")
            history = [
                AttemptRecord(Failure.from_dict(entry["failure"]), int(entry["committed_step"]))
                for entry in body.get("history", [])
            ]
            running, lineage, finished = body.get("running"), body.get("lineage", ""), body.get("finished", "")
            # Files are named by it.
            if not isinstance(lineage, str) or not re.fullmatch(r"[\w.-]{0,100}", lineage, re.ASCII):
                raise ValueError(f"not the id of a run: {lineage!r}")
            if not isinstance(finished, str):
                raise ValueError(f"not the key of a job: {finished!r}")
            skipped = [read_window(window) for window in body.get("skipped", [])]
            reached, lost_steps = body.get("reached", 0), body.get("lost_steps", 0)
            if not all(type(number) is int and 0 <= number < 2**63 for number in (reached, lost_steps)):
                raise ValueError(f"not counts of steps: {reached!r}, {lost_steps!r}")
            return cls(
                history,
                _batch(body.get("batch", {})),
                int(running) if running is not None else None,
                skipped,
                reached,
                lost_steps,
                lineage,
                RunnerProcess.from_dict(body.get("runner")),
                finished,
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return cls()


def _batch(fields: dict[str, Any]) -> BatchDivision:
    batch = BatchDivision(**fields)
    numbers = [number for number in fields.values() if number is not None]
    required = (batch.accumulation, batch.divisor, batch.model_ranks)
    if None in required or not all(type(number) is int and 0 < number < 2**31 for number in numbers):
        raise ValueError(f"not a shape of batches: {fields}")
    return batch
