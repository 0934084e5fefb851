"""States of a run and the moves between them. Anything else is a bug in the supervisor, and fails loudly."""

from __future__ import annotations

from enum import Enum


class RunState(Enum):
    STARTING = "starting"  # launcher and agent come up
    WAITING = "waiting"  # for other nodes
    RUNNING = "running"  # an attempt is alive
    BACKOFF = "backoff"  # between two attempts
    STOPPING = "stopping"  # a stop was requested, the ranks snapshot and end
    FINISHED = "finished"
    PREEMPTED = "preempted"
    FAILED = "failed"


_ENDS = {RunState.FINISHED, RunState.PREEMPTED, RunState.FAILED}
_MOVES: dict[RunState, set[RunState]] = {
    # A stop before the first attempt has nothing to save; a launcher that does not start is a failure.
    # A helper that was killed meanwhile is tried again. An earlier runner may have had the run finished.
    RunState.STARTING: {
        RunState.WAITING,
        RunState.RUNNING,
        RunState.BACKOFF,
        RunState.STOPPING,
        RunState.FINISHED,
        RunState.FAILED,
    },
    # The other nodes come, stay away for too long, or turn out to have finished before.
    RunState.WAITING: {RunState.RUNNING, RunState.BACKOFF, RunState.STOPPING, RunState.FINISHED, RunState.FAILED},
    # All ranks ended well, one died, or someone asked to stop.
    RunState.RUNNING: {RunState.FINISHED, RunState.BACKOFF, RunState.STOPPING, RunState.FAILED},
    # The next attempt, a stop in mid-wait, or a launcher that cannot be brought back.
    RunState.BACKOFF: {RunState.WAITING, RunState.RUNNING, RunState.STOPPING, RunState.FAILED},
    # The stop came too late, went well, or met a failure.
    RunState.STOPPING: {RunState.FINISHED, RunState.PREEMPTED, RunState.FAILED},
    RunState.FINISHED: set(),
    RunState.PREEMPTED: set(),
    RunState.FAILED: set(),
}


class StateMachine:
    """Holds the state; refuses moves that are not listed."""

    def __init__(self) -> None:
        self.state = RunState.STARTING

    def move(self, target: RunState) -> None:
        if target is self.state:
            return
        if target not in _MOVES[self.state]:
            raise AssertionError(f"illegal move {self.state.value} -> {target.value}")
        self.state = target

    @property
    def ended(self) -> bool:
        return self.state in _ENDS
