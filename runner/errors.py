"""Exit codes, and the errors that lead to them.

RunnerError
├── UsageError          2   the configuration or the command line is wrong
├── RunBusy             2   another runner works on this run
├── StorageFailed       74  a file system is read-only, out of reach or broken
│   └── StorageFull         there is no space for checkpoints
├── LaunchError         78  the launcher or the agent cannot be started
│   └── LaunchDelayed   76  it was killed while it started, or cannot start now; retried
├── CheckpointsMissing  81  the location lacks checkpoints that the journal lists as committed
├── GpuMissing          80  none of this node's GPUs can be used
├── GpuFaulty           80  a GPU of this node computes or stores wrong values
├── BadMachineError     80  the hardware of this machine has failed in this run
├── PeersMissing        76  another node of the run does not join in time
└── LeaderReplaced      75  another node leads this run now
"""

from __future__ import annotations

import contextlib
import errno
import os
from enum import IntEnum
from pathlib import Path

from checkpointing.errors import PASSING_ERRNOS


class ExitCode(IntEnum):
    """Exit codes of `runner start`. 74 to 78 keep the meaning that sysexits.h gives them.

    The docstring of a code says what it means, then what to do; the reference page is generated from it.
    """

    DONE = 0
    """The run finished.

    Nothing to do: `best_model` in the folder of the run holds the result."""
    USAGE = 2
    """The configuration, the command line or the script's syntax is wrong, or another runner uses the run.

    Fix what the message names. A restart does not help."""
    STORAGE_FAILED = 74  # EX_IOERR
    """`checkpoint.max_failed_saves` consecutive saves failed, or a file system did not work at the start.

    Repair the checkpoint storage, then start the run again."""
    PREEMPTED = 75  # EX_TEMPFAIL
    """The run stopped on request (SIGTERM, SIGUSR1, Ctrl-C or a preemption notice), with a checkpoint if a step had
    finished.

    Start the run again."""
    BUDGET_SPENT = 76
    """More than `restart.max_restarts` failures without a new checkpoint between them, another node did not come back
    within `launch.rendezvous_timeout_s`, or the checkpoint storage did not answer at the start.

    Start the run again if the cause was temporary; the log names the last failure."""
    DETERMINISTIC = 78  # EX_CONFIG
    """The run would fail the same way again, for example with the same error at the same step.

    Fix the cause in the log. A restart does not help."""
    NO_PROGRESS = 79
    """The restart budget is spent and no checkpoint was ever committed.

    Fix the cause in the log. A restart does not help."""
    BAD_NODE = 80
    """The hardware or the driver of this node is faulty (ECC errors, a lost GPU).

    Start the run again on another node."""
    NO_VALID_CHECKPOINT = 81
    """Checkpoints exist and none is valid, or `checkpoint.location` does not hold what the run committed (an unmounted
    volume, for example).

    Restore the location, or start over with `--resume never`."""


class RunnerError(Exception):
    """Base of the errors that end `runner` with one line instead of a traceback, and with an exit code."""

    exit_code = ExitCode.DETERMINISTIC


class UsageError(RunnerError):
    """The configuration or the command line is wrong. The text names the key, the value and what is allowed."""

    exit_code = ExitCode.USAGE


class StorageFailed(RunnerError):
    """A file system does not work now: it is read-only, out of reach, or broken."""

    exit_code = ExitCode.STORAGE_FAILED


class StorageFull(StorageFailed):
    """There is no space for checkpoints."""


def with_path(error: OSError) -> str:
    """Return what a user reads of an error of the system: the path, where it has one, and why."""
    path = f"{error.filename}: " if error.filename else ""
    return f"{path}{error.strerror or error}"


def unusable(text: str, error: OSError) -> RunnerError:
    """Return the error for a text by whether a name or a permission is wrong, or the file system does not work."""
    # A storage library's own error has none, but is raised from the system's.
    number = error.errno or getattr(error.__cause__, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        what = "no inode is free (df -i): remove files" if _lacks_inodes(error.filename) else "make room"
        return StorageFull(f"{text}; {what}, then start again")
    if number in PASSING_ERRNOS:
        return StorageFailed(f"{text}; start again when that works")
    return UsageError(f"{text}; choose another path, or correct this one")


def _lacks_inodes(path: object) -> bool:
    """Return whether the file system of a path, or of a folder above it, has room for bytes and for no further file."""
    if not isinstance(path, str):
        return False
    for folder in (Path(path), *Path(path).absolute().parents):
        with contextlib.suppress(OSError):
            status = os.statvfs(folder)
            return status.f_files > 0 and status.f_favail == 0 and status.f_bavail > 0
    return False


class RunBusy(RunnerError):
    """Another runner works on this run."""

    exit_code = ExitCode.USAGE


class CheckpointsMissing(RunnerError):
    """The location lacks checkpoints that this run committed: it is another location, or it was emptied."""

    exit_code = ExitCode.NO_VALID_CHECKPOINT


class LaunchError(RunnerError):
    """The launcher or the checkpoint agent cannot be started."""


class LaunchDelayed(LaunchError):
    """The launcher or the checkpoint agent was killed while it started, or cannot start now."""

    exit_code = ExitCode.BUDGET_SPENT


class GpuMissing(RunnerError):
    """This node has GPUs, but none of them can be used."""

    exit_code = ExitCode.BAD_NODE


class GpuFaulty(RunnerError):
    """A GPU of this node computes or stores wrong values, fails, or does not answer."""

    exit_code = ExitCode.BAD_NODE


class BadMachineError(RunnerError):
    """The hardware of this machine has failed in this run not long ago."""

    exit_code = ExitCode.BAD_NODE


class PeersMissing(RunnerError):
    """Another node of the run did not join, or did not rejoin, in time."""

    exit_code = ExitCode.BUDGET_SPENT


class LeaderReplaced(RunnerError):
    """Another node leads this run now; a runner that starts again follows it."""

    exit_code = ExitCode.PREEMPTED
