"""Why an attempt ended on this node, from all that is known of it. No process, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkpointing.agent.protocol import Message
from runner.recovery.classify import classify
from runner.recovery.evidence import RankEnd
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind


@dataclass(frozen=True)
class AttemptEnd:
    """What is known of an attempt that is over.

    Attributes:
        launcher_result: The launcher's last message, or one made up for a launcher that was lost.
        rank_ends: How the failed ranks ended, in the order of their deaths.
        start_step, step: The step it started from, and the last one that it finished.
        kernel_oom_kills: Processes that the kernel killed for memory meanwhile.
        verdict: Why this runner ended the attempt; None where it did not.
        failed_saves: Saves in a row that a tier refused, and why the last one was.
        max_failed_saves: How many are a failure; None: none are.
        script_told: A script without checkpoints of ours was sent SIGTERM.
        asked: Ranks that were asked to stop by somebody else than the runner.
        stop_known: The runner was asked to stop, or another node may have been.
    """

    launcher_result: Message
    rank_ends: Sequence[RankEnd] = ()
    start_step: int = 0
    step: int = 0
    kernel_oom_kills: int = 0
    verdict: Failure | None = None
    failed_saves: tuple[int, str] = (0, "")
    max_failed_saves: int | None = None
    script_told: bool = False
    asked: frozenset[int] = frozenset()
    stop_known: bool = False


def storage_failed(failed_saves: tuple[int, str], limit: int | None) -> bool:
    """Whether so many saves in a row were refused that training should end."""
    return limit is not None and failed_saves[0] >= limit


def failure_of(end: AttemptEnd) -> Failure:
    """One answer to why the attempt ended; its kind may be one that is no failure."""
    result, finished = end.launcher_result, bool(end.launcher_result["finished"])
    if storage_failed(end.failed_saves, end.max_failed_saves) and not finished:
        count, error = end.failed_saves
        cause = f"{count} saves in a row failed (checkpoint.max_failed_saves), the last one: {error}"
        return Failure(FailureKind.STORAGE_FAILED, cause)
    if end.verdict is not None and not finished:
        return end.verdict
    if end.script_told and finished:
        # It has answered the signal in its own way, which is no end of training.
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
        cause = "the script has ended with status 75, which means a stop request to the runner; nobody has made one"
        return Failure(FailureKind.CRASHED, cause, step=end.step, fingerprint="status 75")
    if failure.kind is FailureKind.LAUNCHER_LOST and result.get("error"):
        failure = Failure(FailureKind.LAUNCHER_LOST, result["error"])
    return failure
