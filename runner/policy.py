"""What to do after an attempt has ended. Pure: history in, decision out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.errors import ExitCode
from runner.failure import Failure, FailureKind


@dataclass(frozen=True)
class AttemptRecord:
    """One ended attempt: why, and the newest committed step then (-1: none)."""

    failure: Failure
    committed_step: int


@dataclass(frozen=True)
class Restart:
    """Try again. `failures_in_a_row` counts since the last newly committed step; backoff grows with it."""

    failures_in_a_row: int
    reason: str


@dataclass(frozen=True)
class Stop:
    """End the run with this exit code."""

    exit_code: ExitCode
    reason: str


def decide(history: Sequence[AttemptRecord], *, max_restarts: int, stop_requested: bool) -> Restart | Stop:
    """The decision after the last attempt of `history` (oldest first, at least one).

    The budget of restarts refills whenever a new step has been committed.
    """
    failure = history[-1].failure
    if failure.kind is FailureKind.FINISHED:
        return Stop(ExitCode.DONE, failure.cause)
    if failure.kind is FailureKind.FENCED:
        return Stop(ExitCode.DETERMINISTIC, failure.cause)
    if failure.kind is FailureKind.STORAGE_FAILED:
        return Stop(ExitCode.STORAGE_FAILED, failure.cause)
    if failure.kind in (FailureKind.PREEMPTED, FailureKind.ENDED) or stop_requested:
        return Stop(ExitCode.PREEMPTED, "stopped on request; the same command goes on from the last checkpoint")
    if failure.kind is FailureKind.NO_VALID_CHECKPOINT:
        return Stop(ExitCode.NO_VALID_CHECKPOINT, failure.cause)
    if failure.kind is FailureKind.BOOT:
        return Stop(ExitCode.DETERMINISTIC, f"failed before its first step, and would again: {failure.cause}")
    if len(history) > 1 and failure.fingerprint and history[-2].failure.fingerprint == failure.fingerprint:
        return Stop(ExitCode.DETERMINISTIC, f"the same failure at step {failure.step} twice: {failure.cause}")
    in_a_row = failures_in_a_row(history)
    if in_a_row > max_restarts:
        if history[-1].committed_step < 0:
            return Stop(ExitCode.NO_PROGRESS, f"{in_a_row} failures and not one checkpoint: {failure.cause}")
        return Stop(ExitCode.BUDGET_SPENT, f"{in_a_row} failures without a new checkpoint: {failure.cause}")
    return Restart(in_a_row, failure.cause)


def failures_in_a_row(history: Sequence[AttemptRecord]) -> int:
    """Attempts at the end of `history` that ended with the same newest committed step."""
    last = history[-1].committed_step
    count = 0
    for record in reversed(history):
        if record.committed_step != last:
            break
        count += 1
    return count
