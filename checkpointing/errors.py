"""Errors of this package.

CheckpointError
├── InvalidCheckpoint     it exists but must not be loaded (torn or altered)
│   ├── ForeignCheckpoint     another program wrote it
│   └── StaleCheckpoint       an older attempt has published it after a newer one had begun
├── NoValidCheckpoint     checkpoints exist, none can be loaded
├── StorageUnreachable    storage does not answer or refuses to be read; the checkpoints may be valid
├── CommitConflict        the step is already committed with other content
├── Fenced                a newer attempt has begun; this one may no longer write
├── DamagedMemory         a snapshot's bytes changed in memory; also an OSError
├── CommitFailed          storage refused the write; training may go on, the next save tries again
├── ReplicasDrifted       ranks that must hold equal state do not
├── NonFinite             gradients, parameters or optimizer state are NaN or infinite
├── LossSpike             the loss of a step stands out
├── RepetitionDiffers     a resumed run computes other bits than the run did before
└── AgentUnavailable      the checkpoint agent is gone or refused the request
    └── AgentDelayed          it was killed while it started, or cannot start now
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

# What a file system answers that may pass by itself: a failover, an outage. No mistakes in a name or a permission.
PASSING_ERRNOS = frozenset(
    (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EIO,
        errno.EREMOTEIO,
        errno.ESTALE,
        errno.ENOLCK,
        errno.ENODEV,
        errno.ENXIO,
        errno.EAGAIN,
        errno.EBUSY,
        errno.ENOMEM,
        errno.ENFILE,
        errno.EMFILE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.EPIPE,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
    )
)
# What says nothing about a file that is being read. EIO does: it may be a sector that nobody will ever read again.
AWAY_ERRNOS = PASSING_ERRNOS - {errno.EIO, errno.EREMOTEIO}


def may_pass(error: Exception) -> bool:
    """Return whether the system may answer otherwise the next time."""
    return isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno in PASSING_ERRNOS)


# sysexits.h EX_TEMPFAIL: the run is checkpointed; start it again.
EXIT_PREEMPTED = 75


class CheckpointError(Exception):
    """Base of all errors that this package raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Have other ranks receive it as it is, though its constructor takes something else than its text."""
        return _as_raised, (type(self), self.args, vars(self))


def _as_raised(kind: type[CheckpointError], args: tuple[Any, ...], values: dict[str, Any]) -> CheckpointError:
    error = kind.__new__(kind, *args)
    vars(error).update(values)
    return error


class InvalidCheckpoint(CheckpointError):
    """A checkpoint must not be loaded.

    Attributes:
        where: The checkpoint.
        reason: What is wrong with which file.
    """

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


class ForeignCheckpoint(InvalidCheckpoint):
    """A checkpoint was written by another program, a stock Trainer for example, and must not be changed."""


class StaleCheckpoint(InvalidCheckpoint):
    """An older attempt has published it after a newer one had begun: it does not count, whatever it holds."""


class NoValidCheckpoint(CheckpointError):
    """Checkpoints exist, but none is valid: starting from the beginning would hide the loss."""


class StorageUnreachable(CheckpointError):
    """Storage does not answer or refuses to be read; nothing is known about its checkpoints. Try again later."""


class CommitConflict(CheckpointError):
    """The step is already committed; a committed checkpoint is never overwritten."""


class Fenced(CheckpointError):
    """Another attempt of the same run, with a higher number, has begun at the same location."""

    def __init__(self, newest: int, place: str, attempt: int) -> None:
        super().__init__(
            f"attempt {newest} of this run has begun at {place}: attempt {attempt} may not write there any more; if "
            "two runners were started by mistake, stop one"
        )


class CommitFailed(CheckpointError):
    """Storage refused part of a checkpoint."""


class DamagedMemory(CheckpointError, OSError):
    """A snapshot's bytes have changed in memory since they were captured: it is not published."""


class ReplicasDrifted(CheckpointError):
    """Ranks that must hold the same parameters and optimizer state do not; a checkpoint of either would be wrong."""


class NonFinite(CheckpointError):
    """The gradients of a step, or its parameters and optimizer state, are NaN or infinite: it makes no checkpoint.

    Args:
        step: The step.
        tensors: Names of tensors of its state that are not finite; none where its gradients are not.
    """

    def __init__(self, step: int, tensors: Sequence[str] = ()) -> None:
        found = f" ({', '.join(tensors[:3])}{', …' if tensors[3:] else ''})" if tensors else ""
        super().__init__(
            f"the {'state' if tensors else 'gradients'} of step {step} {'is' if tensors else 'are'} not finite{found}; "
            f"nothing {'resumes from it' if tensors else 'of it is kept'}. If that comes again, its data or the "
            "learning rate are at fault"
            + ("; allow_non_finite=True is for a state that holds infinities on purpose" if tensors else "")
        )
        self.step, self.tensors = step, list(tensors)


class LossSpike(CheckpointError):
    """The loss of a step stands out from those before it; nothing of the step is kept."""

    def __init__(self, step: int, how: str) -> None:
        super().__init__(f"the loss of step {step} is a spike: {how}; nothing of that step is kept")
        self.step = step


class RepetitionDiffers(CheckpointError):
    """A step that a resumed run has recomputed differs from its first computation; nothing of it is kept."""


class AgentUnavailable(CheckpointError):
    """The checkpoint agent cannot be reached or refused a request."""


class AgentDelayed(AgentUnavailable):
    """The checkpoint agent was killed while it started, or cannot start now; a later try may not meet the reason."""


class Preempted(SystemExit):
    """Ends a rank after an agreed stop: the state is committed, and the job is to be started again.

    A `SystemExit`, so that a script that does not handle it cannot mistake the early end of training for a finished
    run, and publish a model.
    """

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.step = step
