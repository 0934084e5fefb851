"""Decide why an attempt ended on this node, from all that is known of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkpointing.agent.protocol import Message
from runner.recovery.classify import RankEnd, classify
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind, kind_of_error


@dataclass(frozen=True)
class AttemptEnd:
    """What is known of an attempt that is over.

    Attributes:
        launcher_result: The launcher's last message, or one in its place for a launcher that was lost.
        rank_ends: How the failed ranks ended, in the order of their deaths.
        start_step: Step that it started from.
        step: Last step that it finished.
        kernel_oom_kills: Processes that the kernel killed meanwhile for lack of memory.
        verdict: Why this runner ended the attempt; None if it did not.
        failed_saves: Failed saves of a tier in a row, and why the last one failed.
        max_failed_saves: How many of them are a failure; None if none are.
        script_signalled: Whether a script without checkpoints of ours was sent SIGTERM.
        asked: Ranks that were asked to stop by something other than the runner.
        stop_known: Whether the runner was asked to stop, or another node may have been.
    """

    launcher_result: Message
    rank_ends: Sequence[RankEnd] = ()
    start_step: int = 0
    step: int = 0
    kernel_oom_kills: int = 0
    verdict: Failure | None = None
    failed_saves: tuple[int, str] = (0, "")
    max_failed_saves: int | None = None
    script_signalled: bool = False
    asked: frozenset[int] = frozenset()
    stop_known: bool = False


def storage_failed(failed_saves: tuple[int, str], limit: int | None) -> bool:
    """Return whether so many saves in a row failed that training should end."""
    return limit is not None and failed_saves[0] >= limit


def failure_of(end: AttemptEnd) -> Failure:
    """Return why the attempt ended; the kind of a good end is not a failure."""
    result, finished = end.launcher_result, bool(end.launcher_result["finished"])
    if storage_failed(end.failed_saves, end.max_failed_saves) and not finished:
        count, error = end.failed_saves
        cause = f"{count} saves in a row failed (checkpoint.max_failed_saves), the last one: {error}"
        return Failure(FailureKind.STORAGE_FAILED, cause)
    if end.verdict is not None and not finished:
        return end.verdict
    if end.script_signalled and finished:
        # The script handled the signal itself, which does not mean that training has finished.
        return Failure(FailureKind.PREEMPTED, "the script has ended in answer to SIGTERM")
    if result.get("launcher_lost"):
        return Failure(FailureKind.LAUNCHER_LOST, "the launcher died")
    failure = classify(
        list(end.rank_ends),
        finished=finished,
        started_step=end.start_step,
        step=end.step,
        kernel_oom_kills=end.kernel_oom_kills,
    )
    if failure.kind is FailureKind.PREEMPTED and not end.stop_known and not end.asked:
        cause = "the script exited with status 75, which is reserved for stop requests, but no stop was requested"
        return Failure(FailureKind.CRASHED, cause, step=end.step, fingerprint="status 75")
    if failure.kind is FailureKind.LAUNCHER_LOST and result.get("error"):
        error = result["error"]
        if kind_of_error(error) is FailureKind.STORAGE_FAILED:
            # It could not write its logs; ranks that meet a full disk end the run in the same way.
            return Failure(FailureKind.STORAGE_FAILED, error + FailureKind.STORAGE_FAILED.rule.advice)
        return Failure(FailureKind.LAUNCHER_LOST, error)
    return failure
