"""Ends of a run that no attempt has caused."""

from __future__ import annotations

from checkpointing.commit.tiers import Tiers
from checkpointing.storage import Storage
from runner.errors import ExitCode, RunnerError
from runner.recovery.policy import Stop


def end_of_error(error: RunnerError | OSError) -> Stop:
    """Return how a runner ends that met an error outside of an attempt."""
    if isinstance(error, RunnerError):
        return Stop(error.exit_code, str(error))
    # Such as a full disk or too many open files: a later start, or another node, may not meet it.
    path = f"{error.filename}: " if error.filename else ""
    return Stop(ExitCode.BUDGET_SPENT, f"system error: {path}{error.strerror or error}")


def end_without_location(durable: Storage, attempt: int) -> Stop | None:
    """Return how a run ends whose location has been removed or unmounted; None if it is there.

    Another attempt would start from the beginning, in another folder of that name.

    Args:
        durable: The durable tier.
        attempt: The attempt that has ended.
    """
    root = durable.root
    if root is None or root.is_dir():
        return None
    return Stop(ExitCode.STORAGE_FAILED, f"{root} existed when attempt {attempt} began and is gone; put it back")


def end_without_last_save(tiers: Tiers, *, is_stop: bool) -> Stop:
    """Return how a run ends that has trained to its end, and whose last checkpoint was not written.

    Args:
        tiers: Where it was to be written.
        is_stop: It was asked to stop, so that there was no time for it.
    """
    if is_stop:
        return Stop(ExitCode.PREEMPTED, "stopped on request while the last checkpoint was being written")
    reason = "trained to the end, but the last checkpoint was not written"
    if tiers.local is not None:
        reason += f" to {tiers.durable.location}; start the run again on this machine to upload what is in "
        reason += str(tiers.local.location)
    return Stop(ExitCode.STORAGE_FAILED, reason)
