"""What a run's journal says about its progress, and the restarts that injected faults account for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.journal.journal import Event
from runner.recovery.kinds import FailureKind

_PROGRESS = ("log", "snapshot", "committed")


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


def latest_step(events: Sequence[Event]) -> int:
    """Return the highest step that was logged, captured or committed; 0 before the first one."""
    return max((event["step"] for event in events if event["event"] in _PROGRESS), default=0)


def latest_attempt(events: Sequence[Event]) -> int:
    """Return the number of the newest attempt; 0 before the first one."""
    return max((event["attempt"] for event in events), default=0)


def num_restarts(events: Sequence[Event]) -> int:
    """Return how many attempts followed a failed one."""
    return sum(event["event"] == "backoff" for event in events)


def num_saves_begun(events: Sequence[Event]) -> int:
    """Return how many snapshots were taken that are to be committed."""
    return sum(event["to_be_committed"] for event in events if event["event"] == "snapshot")


def is_halved(events: Sequence[Event]) -> bool:
    """Return whether the run halved its micro-batch after it ran out of memory."""
    return any(
        event["event"] == "attempt_ended" and event["kind"] == FailureKind.OUT_OF_MEMORY.value for event in events
    )


def has_progressed(events: Sequence[Event], since: int, attempt: int | None) -> bool:
    """Return whether the run made a step after a fault.

    Args:
        events: The journal.
        since: Number of events when the fault was injected.
        attempt: The attempt that continues; None where the newest attempt must have begun after the fault.
    """
    newer = events[since:]
    if attempt is not None:
        return any(event["event"] in _PROGRESS and event["attempt"] >= attempt for event in newer)
    newest = latest_attempt(events)
    return any(event["event"] == "training_started" for event in newer) and any(
        event["event"] in _PROGRESS and event["attempt"] == newest for event in newer
    )


def has_session(events: Sequence[Event], pid: int) -> bool:
    """Return whether the runner with this process id wrote to the journal."""
    return any(event["event"] == "run_started" and event["pid"] == pid for event in events)


def num_sessions_in_journal(events: Sequence[Event], sessions: int, pid: int) -> int:
    """Return how many sessions the journal should contain.

    A session that finds its run finished writes nothing.

    Args:
        events: The journal.
        sessions: Starts of the runner.
        pid: Process id of the last one.
    """
    ended = [event for event in events if event["event"] == "run_ended"]
    started = [event for event in events if event["event"] == "run_started"]
    was_finished = bool(ended) and ended[-1]["state"] == "finished"
    return sessions - (was_finished and started[-1]["pid"] != pid)
