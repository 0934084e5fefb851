"""What can go wrong with a checkpoint.

CheckpointError
├── InvalidCheckpoint     it exists but must not be loaded (torn, altered, foreign)
├── NoValidCheckpoint     checkpoints exist, none can be loaded
├── StorageUnreachable    it does not answer, or refuses to be read; what is there may be sound
├── CommitConflict        the step is already committed with other content
├── Fenced                a newer attempt has begun; this one may not write any more
├── CommitFailed          storage refused the write; training may go on, the next save tries again
├── ReplicasDrifted       ranks that must hold equal state do not
├── NonFinite             a step's gradients are no numbers any more
└── AgentUnavailable      the checkpoint agent is gone or refused the request
    └── AgentKilled           it was killed while it started
"""

from __future__ import annotations

# sysexits.h EX_TEMPFAIL: the run is checkpointed, start it again.
EXIT_PREEMPTED = 75


class CheckpointError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidCheckpoint(CheckpointError):
    """A checkpoint that must not be loaded; `reason` says what is wrong with which file."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


class ForeignCheckpoint(InvalidCheckpoint):
    """It was written by something else than this library, a stock Trainer for example: nobody's to touch."""


class NoValidCheckpoint(CheckpointError):
    """Checkpoints exist and none is valid: starting over silently would hide the loss."""


class StorageUnreachable(CheckpointError):
    """Storage does not answer or refuses to be read. Says nothing about the checkpoints there: try again later."""


class CommitConflict(CheckpointError):
    """The step has already been committed; a committed checkpoint is never overwritten."""


class Fenced(CheckpointError):
    """Another attempt of the same run, with a higher number, has begun at the same place."""

    def __init__(self, newest: int, place: str, attempt: int) -> None:
        super().__init__(
            f"attempt {newest} of this run has begun at {place}: attempt {attempt} may not write there any more; if "
            "two runners were started by mistake, stop one"
        )


class CommitFailed(CheckpointError):
    """Storage refused part of a checkpoint."""


class ReplicasDrifted(CheckpointError):
    """Ranks that must hold the same parameters and optimizer state do not: a checkpoint of either would be wrong."""


class NonFinite(CheckpointError):
    """A step whose gradients are infinite or NaN, and with it every parameter: nothing of it may be kept."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"the gradients of step {step} are not finite; nothing of it is kept. If that comes again, its data or the "
            "learning rate are at fault"
        )
        self.step = step


class LossSpike(CheckpointError):
    """A step whose loss stands out from those before it; nothing of it is kept."""

    def __init__(self, step: int, how: str) -> None:
        super().__init__(f"the loss of step {step} is a spike: {how}; nothing of that step is kept")
        self.step = step


class AgentUnavailable(CheckpointError):
    """The checkpoint agent cannot be reached or refused a request."""


class AgentKilled(AgentUnavailable):
    """The checkpoint agent was killed while it started."""


class Preempted(SystemExit):
    """Ends a rank after an agreed stop: the state is committed, the job is to be started again.

    A `SystemExit`, so that a script that knows nothing of it cannot mistake the early end of training for a
    finished run and go on to publish a model.
    """

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.step = step
