"""Exit codes, and the errors that lead to them.

RunnerError
├── UsageError          2   the user's configuration or command line; one line, no traceback
├── RunBusy             2   another runner works on this run
├── LaunchError         78  the launcher or agent cannot be started at all
│   └── HelperKilled        it was killed while it started: tried again
├── CheckpointsMissing  81  the location does not hold what the journal says was committed
└── PeersMissing        76  another machine of the run does not come (back)
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What `runner start` ends with. 74 to 78 keep the meaning that sysexits.h gives them."""

    DONE = 0
    USAGE = 2
    STORAGE_FAILED = 74  # max_failed_saves in a row; sysexits.h EX_IOERR
    PREEMPTED = 75  # checkpointed: start me again
    BUDGET_SPENT = 76  # transient failures, more than max_restarts without a new checkpoint between them
    DETERMINISTIC = 78  # it would fail the same way again
    NO_PROGRESS = 79  # the budget is spent and not one step was committed
    BAD_NODE = 80  # this machine is at fault: start me on another one
    NO_VALID_CHECKPOINT = 81  # checkpoints exist, none can be loaded; or they are not where they were


class RunnerError(Exception):
    """Base of the errors that end `runner` with one clear line."""

    exit_code = ExitCode.DETERMINISTIC


class UsageError(RunnerError):
    """The configuration or the command line is wrong; the text names the key, the value and what is allowed."""

    exit_code = ExitCode.USAGE


class StorageFull(RunnerError):
    """There is no room for checkpoints."""

    exit_code = ExitCode.STORAGE_FAILED


class RunBusy(RunnerError):
    """Another runner works on this run."""

    exit_code = ExitCode.USAGE


class CheckpointsMissing(RunnerError):
    """The location does not hold what this run has committed: it is another place, or an empty one."""

    exit_code = ExitCode.NO_VALID_CHECKPOINT


class LaunchError(RunnerError):
    """The launcher or the checkpoint agent cannot be started."""


class HelperKilled(LaunchError):
    """The launcher or the checkpoint agent was killed while it started, by somebody or for want of memory."""


class GpuMissing(RunnerError):
    """This machine has GPUs, and none of them can be used."""

    exit_code = ExitCode.BAD_NODE


class PeersMissing(RunnerError):
    """Another machine of the run did not come, or did not come back, in time."""

    exit_code = ExitCode.BUDGET_SPENT
