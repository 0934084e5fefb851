"""Decide what to do after an attempt has ended. Pure: history in, decision out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from runner.errors import ExitCode
from runner.recovery.failure import Failure, Window
from runner.recovery.kinds import Action, FailureKind

# Parts of a micro-batch in scripts that do not report how they divide their batches.
_MAX_DIVISOR = 64
# For all scripts: more parts than a micro-batch has samples.
_MAX_CUTS = 65536


@dataclass(frozen=True)
class AttemptRecord:
    """One ended attempt: why it ended, and the newest committed step at that time, -1 if there was none."""

    failure: Failure
    committed_step: int


@dataclass(frozen=True)
class BatchDivision:
    """How one rank's share of a global batch is divided."""

    micro_batch: int | None = None  # Samples of one forward and backward pass; None if the script has not reported it.
    accumulation: int = 1  # Micro-batches of one step.
    divisor: int = 1  # Parts that the configured micro-batch is divided into.
    samples: int | None = None  # Samples of a step that any number of ranks can share; None if they must divide it.
    model_ranks: int = 1  # Ranks that compute the same samples together (tensor parallelism).

    def halved(self) -> BatchDivision | None:
        """Return the same global batch in micro-batches of half the size; None if they cannot be halved."""
        if self.micro_batch is None:
            return replace(self, divisor=2 * self.divisor) if 2 * self.divisor <= _MAX_DIVISOR else None
        if self.micro_batch % 2 or self.divisor > _MAX_CUTS:
            return None
        return replace(
            self, micro_batch=self.micro_batch // 2, accumulation=2 * self.accumulation, divisor=2 * self.divisor
        )

    def __str__(self) -> str:
        if self.micro_batch is None:
            return f"micro-batches divided into {self.divisor} parts"
        return f"micro-batch {self.micro_batch} x accumulation {self.accumulation}"


WHOLE_BATCHES = BatchDivision()


@dataclass(frozen=True)
class Restart:
    """Start the next attempt."""

    failures_in_a_row: int  # Failures since the last newly committed step; the backoff grows with it.
    reason: str  # Why, for people.
    batch: BatchDivision = WHOLE_BATCHES  # How batches are divided from now on.
    skip: Window | None = None  # Steps that are skipped from now on, besides those before.


@dataclass(frozen=True)
class Stop:
    """End the run with the runner's exit code, and a reason for people."""

    exit_code: ExitCode
    reason: str


def decide(
    history: Sequence[AttemptRecord],
    *,
    max_restarts: int,
    stop_requested: bool,
    max_network_retries: int = 0,
    batch: BatchDivision = WHOLE_BATCHES,
    skips_left: int = 0,
    can_cut: bool = True,
) -> Restart | Stop:
    """Decide after the last attempt of a history.

    The budget of restarts is refilled whenever a new step has been committed, unless the next failure is at the same
    step as the last one: checkpoints that come nearer to that step do not get the run past it.

    Args:
        history: Ended attempts, oldest first, at least one; preemptions only as the last one.
        max_restarts: Failures that the budget allows between two new checkpoints.
        stop_requested: Whether the run was asked to stop.
        max_network_retries: Restarts after network failures without a new checkpoint between them; they cost no
            budget.
        batch: How batches are divided now.
        skips_left: Windows of steps that may still be skipped.
        can_cut: Whether the job divides its batches on request.
    """
    failure = history[-1].failure
    rule = failure.kind.rule
    if (end := _end_of_run(history[-1], stop_requested=stop_requested)) is not None:
        return end
    if rule.action is Action.CONTINUE:
        return Restart(0, failure.cause, batch)
    if failure.may_pass and not (len(history) > 1 and history[-2].failure.may_pass):
        # Memory that the attempt before had not released yet, or that another process held for a moment.
        return Restart(1, f"{failure.cause}: retrying once as it is", batch)
    if rule.action is Action.GIVE_UP:
        return _stop(failure)
    in_a_row = failures_in_a_row(history, can_cut=can_cut)
    if rule.action is Action.HALVE and can_cut:
        return _halve(failure, batch, in_a_row)
    if rule.action is Action.RETRY:
        return _retry(history, batch, max_network_retries)
    if len(history) > 1 and failure.signature and history[-2].failure.signature == failure.signature:
        return _twice(failure, batch, in_a_row, skips_left)
    if in_a_row > max_restarts:
        return _budget_spent(history, in_a_row)
    return Restart(in_a_row, failure.cause, batch)


def _end_of_run(last: AttemptRecord, *, stop_requested: bool) -> Stop | None:
    """Return the end of a run that is finished, fenced or asked to stop; None for a failure to recover from."""
    action = last.failure.kind.rule.action
    if action is Action.FINISH:
        return Stop(ExitCode.DONE, last.failure.cause)
    if action is Action.END:
        return _stop(last.failure)
    if action is Action.STOP or stop_requested:
        return stopped_on_request(last.committed_step)
    return None


def stopped_on_request(committed_step: int) -> Stop:
    """Return the end of a run that was asked to stop; `committed_step` is its newest checkpoint, -1 for none."""
    after = "continues from the last checkpoint" if committed_step >= 0 else "starts from the beginning"
    return Stop(ExitCode.PREEMPTED, f"stopped on request; the same command {after}")


def _twice(failure: Failure, batch: BatchDivision, in_a_row: int, skips_left: int) -> Restart | Stop:
    if failure.kind.rule.action is Action.SKIP and failure.window is not None and skips_left > 0:
        # Bounded by itself, too.
        first, last = failure.window
        return Restart(
            in_a_row, f"{failure.cause}: twice, so steps {first} to {last} are skipped", batch, failure.window
        )
    return Stop(ExitCode.DETERMINISTIC, f"the same failure at step {failure.step} twice: {failure.cause}")


def _stop(failure: Failure) -> Stop:
    rule = failure.kind.rule
    assert rule.exit_code is not None, f"{failure.kind} has no exit code"
    return Stop(rule.exit_code, rule.reason.format(cause=failure.cause))


def _halve(failure: Failure, batch: BatchDivision, in_a_row: int) -> Restart | Stop:
    smaller = batch.halved()
    if smaller is None:
        return Stop(
            ExitCode.DETERMINISTIC,
            f"{failure.cause}; with {batch} there is nothing left to halve: choose a smaller model, shorter "
            "sequences, or a node with more memory",
        )
    return Restart(in_a_row, f"{failure.cause}: retrying with {smaller}", smaller)


def _retry(history: Sequence[AttemptRecord], batch: BatchDivision, max_retries: int) -> Restart | Stop:
    failure = history[-1].failure
    tries = _in_a_row(history, lambda kind: kind is failure.kind)
    if tries > max_retries:
        what = "network failures" if failure.kind is FailureKind.NETWORK else "failures at a machine limit"
        return Stop(ExitCode.BUDGET_SPENT, f"{tries} {what} without a new checkpoint: {failure.cause}")
    # Unlike other failures, the first one waits as well: at once, the server would only give the same answer.
    return Restart(tries + 1, failure.cause, batch)


def _budget_spent(history: Sequence[AttemptRecord], in_a_row: int) -> Stop:
    failure = history[-1].failure
    if history[-1].committed_step < 0:
        return Stop(ExitCode.NO_PROGRESS, f"{in_a_row} failures and no checkpoint: {failure.cause}")
    nearer = any(record.committed_step != history[-1].committed_step for record in history[-in_a_row:])
    where = f"at step {failure.step}" if nearer else "without a new checkpoint"
    return Stop(ExitCode.BUDGET_SPENT, f"{in_a_row} failures {where}: {failure.cause}")


def end_of_node(decision: Stop, node: int, bad_nodes: Collection[int]) -> Stop:
    """Decide how one node ends, given how the run ends.

    Schedulers count failures by node, and replace a node that exits with `BAD_NODE`. The others are healthy, so they
    exit with `PREEMPTED`, which costs nothing. There are no `bad_nodes` in a run of one node.
    """
    if decision.exit_code is not ExitCode.BAD_NODE or not bad_nodes or node in bad_nodes:
        return decision
    names = ", ".join(map(str, sorted(bad_nodes)))
    cause = decision.reason.partition(": ")[2]
    return Stop(ExitCode.PREEMPTED, f"node {names} is at fault; the same command continues on a replacement: {cause}")


def failures_in_a_row(history: Sequence[AttemptRecord], *, can_cut: bool = True) -> int:
    """Count the failures at the end of a history that brought the run no further and cost budget.

    For a job that cannot divide its batches on request, running out of memory costs budget, too.
    """
    return _in_a_row(history, lambda kind: kind.rule.costs_budget or (kind.rule.action is Action.HALVE and not can_cut))


def _in_a_row(history: Sequence[AttemptRecord], counts: Callable[[FailureKind], bool]) -> int:
    last = history[-1]
    no_further = itertools.takewhile(
        lambda record: record.committed_step == last.committed_step or _same_place(record.failure, last.failure),
        reversed(history),
    )
    return sum(counts(record.failure.kind) for record in no_further)


def _same_place(one: Failure, other: Failure) -> bool:
    return one.step > 0 and one.kind.rule.costs_budget and (one.kind, one.step) == (other.kind, other.step)


def backoff_s(
    failures_in_a_row: int, *, initial_s: float, max_s: float, jitter_s: float, source: random.Random | None = None
) -> float:
    """Return the seconds to wait before the next attempt.

    None after a first failure, `initial_s` after the second one, then doubling, plus up to `jitter_s`, distributed
    uniformly; all at most `max_s`.
    """
    if failures_in_a_row <= 1:
        return 0.0
    return min(initial_s * 2.0 ** min(failures_in_a_row - 2, 60) + (source or random).uniform(0.0, jitter_s), max_s)
