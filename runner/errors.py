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
    """Exit codes of `runner start`. 74 to 78 keep the meaning that sysexits.h gives them.

    The docstring of a code says what it means, then what to do; the reference page is generated from it.
    """

    DONE = 0
    """The run finished.

    Nothing to do: `best_model` in the folder of the run holds the result."""
    USAGE = 2
    """The configuration or the command line is wrong, or another runner uses the run.

    Fix what the message names. A restart does not help."""
    STORAGE_FAILED = 74  # EX_IOERR
    """`checkpoint.max_failed_saves` consecutive saves failed.

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
