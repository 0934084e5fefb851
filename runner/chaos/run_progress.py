"""What a run's journal says about its progress, and the restarts that injected faults account for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkpointing.agent.events import Committed, Log, SnapshotTaken, TrainingStarted
from runner.journal.events import AttemptEnded, Backoff, Entry, RunEnded, RunStarted
from runner.recovery.kinds import FailureKind

_PROGRESS = (Log, SnapshotTaken, Committed)


@dataclass
class Expected:
    """What the injected faults account for.

    Attributes:
        sessions: Starts of the runner.
        min_restarts: Restarts of attempts that are certain.
        max_restarts: Restarts of attempts that are possible.
    """

    sessions: int = 1
    min_restarts: int = 0
    max_restarts: int = 0


def latest_step(entries: Sequence[Entry]) -> int:
    """Return the highest step that was logged, captured or committed; 0 before the first one."""
    return max((entry.event.step for entry in entries if isinstance(entry.event, _PROGRESS)), default=0)


def latest_attempt(entries: Sequence[Entry]) -> int:
    """Return the number of the newest attempt; 0 before the first one."""
    return max((entry.attempt for entry in entries), default=0)


def num_restarts(entries: Sequence[Entry]) -> int:
    """Return how many attempts followed a failed one."""
    return sum(isinstance(entry.event, Backoff) for entry in entries)


def num_saves_begun(entries: Sequence[Entry]) -> int:
    """Return how many snapshots were taken that are to be committed."""
    return sum(entry.event.to_be_committed for entry in entries if isinstance(entry.event, SnapshotTaken))


def is_halved(entries: Sequence[Entry]) -> bool:
    """Return whether the run halved its micro-batch after it ran out of memory."""
    ended = (entry.event for entry in entries if isinstance(entry.event, AttemptEnded))
    return any(event.kind == FailureKind.OUT_OF_MEMORY.value for event in ended)


def has_progressed(entries: Sequence[Entry], since: int, attempt: int | None) -> bool:
    """Return whether the run made a step after a fault.

    Args:
        entries: The journal.
        since: Number of entries when the fault was injected.
        attempt: The attempt that continues; None where the newest attempt must have begun after the fault.
    """
    newer = entries[since:]
    if attempt is not None:
        return any(isinstance(entry.event, _PROGRESS) and entry.attempt >= attempt for entry in newer)
    newest = latest_attempt(entries)
    return any(isinstance(entry.event, TrainingStarted) for entry in newer) and any(
        isinstance(entry.event, _PROGRESS) and entry.attempt == newest for entry in newer
    )


def has_session(entries: Sequence[Entry], pid: int) -> bool:
    """Return whether the runner with this process id wrote to the journal."""
    return any(isinstance(entry.event, RunStarted) and entry.event.pid == pid for entry in entries)


def num_sessions_in_journal(entries: Sequence[Entry], sessions: int, pid: int) -> int:
    """Return how many sessions the journal should contain.

    A session that finds its run finished writes nothing.

    Args:
        entries: The journal.
        sessions: Starts of the runner.
        pid: Process id of the last one.
    """
    ended = [entry.event for entry in entries if isinstance(entry.event, RunEnded)]
    started = [entry.event for entry in entries if isinstance(entry.event, RunStarted)]
    was_finished = bool(ended) and ended[-1].state == "finished"
    return sessions - (was_finished and started[-1].pid != pid)
