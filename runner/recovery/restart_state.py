"""What a run's next supervisor must know, on whatever machine: kept beside the checkpoints by the agent."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checkpointing import locking
from runner.recovery.kinds import Failure, FailureKind, Window, read_window
from runner.recovery.policy import WHOLE_BATCHES, AttemptRecord, BatchShape
from runner.system import processes

# Of failures without a new checkpoint between them; more than any budget.
_MAX_FAILURES = 100
# How long a node waits for others before it looks whether the job has finished without it.
FINISHED_PATIENCE_S = 30.0


@dataclass(frozen=True)
class RunnerProcess:
    """A supervisor, known by its machine, its process number and when it started.

    Attributes:
        started: clock ticks since the machine started: a process number is used again, but not at the same tick.
    """

    host: str
    pid: int
    started: int

    @classmethod
    def current(cls) -> RunnerProcess:
        pid = os.getpid()
        return cls(locking.this_machine(), pid, processes.start_ticks(pid) or 0)

    @property
    def is_alive_here(self) -> bool:
        """Whether it lives, on this machine, and is another process than this one."""
        here = self.host == locking.this_machine() and self.pid != os.getpid()
        return here and processes.start_ticks(self.pid) == self.started

    @property
    def is_gone_here(self) -> bool:
        """Whether it ran on this machine, and has ended."""
        return self.host == locking.this_machine() and processes.start_ticks(self.pid) != self.started

    @classmethod
    def from_dict(cls, body: Any) -> RunnerProcess | None:
        """None where it cannot be understood: a note of an older version has none."""
        try:
            host, pid, started = body["host"], body["pid"], body["started"]
        except (KeyError, TypeError):
            return None
        if not isinstance(host, str) or type(pid) is not int or type(started) is not int or not 0 < pid < 2**31:
            return None
        return cls(host, pid, started)


def process_namespace() -> str:
    """Where process numbers mean the same (pid_namespaces(7)); containers of one machine may have the same name."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


@dataclass
class RunRecord:
    """Failures since the last newly committed step, and how batches are cut.

    Attributes:
        running: the attempt that is alive; None between two. A supervisor that finds one here has been preceded by one
            that ended without a word.
        skipped: windows of steps that are passed over.
        reached: the newest step that the last attempt which trained has finished.
        lost_steps: steps that have been computed again, as far as their loss was seen by a runner that lived on.
        lineage: the id of the first life of this run that kept a record: the same on whatever machine it goes on.
        runner: The supervisor that wrote it last.
        finished: the job that has run to its end, with all of it durable (`identity.key_of`); empty before, and while
            it goes further.
    """

    history: list[AttemptRecord] = field(default_factory=list)
    batch: BatchShape = WHOLE_BATCHES
    running: int | None = None
    skipped: list[Window] = field(default_factory=list)
    reached: int = 0
    lost_steps: int = 0
    lineage: str = ""
    runner: RunnerProcess | None = None
    finished: str = ""

    def add(self, record: AttemptRecord) -> None:
        """Note down a failure; those before a newly committed step are forgotten.

        But for the last: the snapshots of an attempt that fails are committed, and its failure may come again yet.
        """
        if self.history and self.history[-1].committed_step != record.committed_step:
            del self.history[:-1]
        self.history = [*self.history, record][-_MAX_FAILURES:]

    def account_for_steps(self, first: int, last: int) -> None:
        """An attempt has trained from step `first` to `last`."""
        self.lost_steps += max(self.reached - first, 0)
        self.reached = last

    def account_for_lost_runner(self, committed_step: int) -> bool:
        """A runner that was killed with everything it had started has cost an attempt; whether there was one."""
        if self.running is None:
            return False
        cause = f"attempt {self.running} ended together with its runner"
        self.add(AttemptRecord(Failure(FailureKind.RUNNER_LOST, cause), committed_step))
        self.running = None
        return True

    def to_json(self, attempt: int) -> str:
        """`attempt`: the newest; an older runner's record does not replace a newer one's."""
        history = [{"failure": r.failure.to_dict(), "committed_step": r.committed_step} for r in self.history]
        body = {"attempt": attempt, "history": history, "batch": asdict(self.batch), "running": self.running}
        body |= {"skipped": self.skipped, "lineage": self.lineage, "finished": self.finished}
        body |= {"reached": self.reached, "lost_steps": self.lost_steps}
        body |= {"runner": asdict(self.runner)} if self.runner is not None else {}
        return json.dumps(body)

    @classmethod
    def from_json(cls, data: bytes | str | None) -> RunRecord:
        """What `to_json` made; an empty record where there is none, or where it cannot be understood.

        Losing it costs a few restarts more; refusing to start would cost the run.
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
                raise ValueError(f"no id of a run: {lineage!r}")
            if not isinstance(finished, str):
                raise ValueError(f"no key of a job: {finished!r}")
            skipped = [read_window(window) for window in body.get("skipped", [])]
            reached, lost_steps = body.get("reached", 0), body.get("lost_steps", 0)
            if not all(type(number) is int and 0 <= number < 2**63 for number in (reached, lost_steps)):
                raise ValueError(f"no counts of steps: {reached!r}, {lost_steps!r}")
            return cls(
                history,
                _batch(**body.get("batch", {})),
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


def _batch(micro_batch: int | None = None, accumulation: int = 1, divisor: int = 1) -> BatchShape:
    numbers = [accumulation, divisor, *([micro_batch] if micro_batch is not None else [])]
    if not all(type(number) is int and 0 < number < 2**31 for number in numbers):
        raise ValueError(f"no shape of batches: {numbers}")
    return BatchShape(micro_batch, accumulation, divisor)
