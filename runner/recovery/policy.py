"""What to do after an attempt has ended. Pure: history in, decision out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from runner.errors import ExitCode
from runner.recovery.kinds import Failure, FailureKind, Window

# Of scripts that do not say how they cut their batches.
_MAX_DIVISOR = 64
# Of any: more parts than a micro-batch has samples.
_MAX_CUTS = 65536


@dataclass(frozen=True)
class AttemptRecord:
    """One ended attempt: why, and the newest committed step then (-1: none)."""

    failure: Failure
    committed_step: int


@dataclass(frozen=True)
class BatchShape:
    """How one rank's share of a global batch is cut.

    Attributes:
        micro_batch: samples in one forward and backward; None where the script has not said.
        accumulation: of those in one step.
        divisor: into how many parts the configured micro-batch is cut.
    """

    micro_batch: int | None = None
    accumulation: int = 1
    divisor: int = 1

    def halved(self) -> BatchShape | None:
        """The same global batch in half as large portions; None where that cannot be."""
        if self.micro_batch is None:
            return BatchShape(divisor=2 * self.divisor) if 2 * self.divisor <= _MAX_DIVISOR else None
        if self.micro_batch % 2 or self.divisor > _MAX_CUTS:
            return None
        return BatchShape(self.micro_batch // 2, 2 * self.accumulation, 2 * self.divisor)

    def __str__(self) -> str:
        if self.micro_batch is None:
            return f"micro-batches cut into {self.divisor} parts"
        return f"micro-batch {self.micro_batch} x accumulation {self.accumulation}"


WHOLE_BATCHES = BatchShape()


@dataclass(frozen=True)
class Restart:
    """Try again. `failures_in_a_row` counts since the last newly committed step; backoff grows with it.

    Attributes:
        batch: how batches are to be cut from now on.
        skip: steps that are passed over from now on, besides those before.
    """

    failures_in_a_row: int
    reason: str
    batch: BatchShape = WHOLE_BATCHES
    skip: Window | None = None


@dataclass(frozen=True)
class Stop:
    """End the run with this exit code."""

    exit_code: ExitCode
    reason: str


_ENDINGS = {
    FailureKind.FENCED: ExitCode.DETERMINISTIC,
    FailureKind.STORAGE_FAILED: ExitCode.STORAGE_FAILED,
    FailureKind.NO_VALID_CHECKPOINT: ExitCode.NO_VALID_CHECKPOINT,
}

# By what can be halved, and by a number of their own.
_OWN_BOUNDS = {FailureKind.OUT_OF_MEMORY, FailureKind.NETWORK}


def decide(
    history: Sequence[AttemptRecord],
    *,
    max_restarts: int,
    stop_requested: bool,
    max_network_retries: int = 0,
    batch: BatchShape = WHOLE_BATCHES,
    skips_left: int = 0,
    can_cut: bool = True,
) -> Restart | Stop:
    """The decision after the last attempt of `history` (oldest first, at least one; preemptions are not in it).

    The budget of restarts refills whenever a new step has been committed, unless the next failure is at the same step
    as the last one: checkpoints that come nearer to it are no way past it.

    Args:
        max_network_retries: restarts after a network failure, without a new checkpoint between them; they cost no
            budget.
        skips_left: windows of steps that may be passed over yet.
        can_cut: the job cuts its batches into the parts that it is given.
    """
    failure = history[-1].failure
    if failure.kind is FailureKind.FINISHED:
        return Stop(ExitCode.DONE, failure.cause)
    if failure.kind in _ENDINGS:
        return Stop(_ENDINGS[failure.kind], failure.cause)
    if failure.kind in (FailureKind.PREEMPTED, FailureKind.ENDED) or stop_requested:
        after = "continues from the last checkpoint" if history[-1].committed_step >= 0 else "starts from the beginning"
        return Stop(ExitCode.PREEMPTED, f"stopped on request; the same command {after}")
    if failure.may_pass and not (len(history) > 1 and history[-2].failure.may_pass):
        # Memory that the attempt before had not given back yet, or somebody else's for a moment.
        return Restart(1, f"{failure.cause}: retrying once as it is", batch)
    if failure.kind is FailureKind.BAD_NODE:
        return Stop(ExitCode.BAD_NODE, f"this node is at fault; start the run on another one: {failure.cause}")
    if failure.kind is FailureKind.BOOT:
        return Stop(ExitCode.DETERMINISTIC, f"{failure.cause}; failed before the first step, not retried")
    in_a_row = failures_in_a_row(history, can_cut=can_cut)
    if failure.kind is FailureKind.OUT_OF_MEMORY and can_cut:
        smaller = batch.halved()
        if smaller is None:
            return Stop(
                ExitCode.DETERMINISTIC,
                f"{failure.cause}; with {batch} there is nothing left to halve: choose a smaller model, shorter "
                "sequences, or a machine with more memory",
            )
        # Bounded by itself, so that it needs no budget.
        return Restart(in_a_row, f"{failure.cause}: retrying with {smaller}", smaller)
    if failure.kind is FailureKind.NETWORK:
        tries = _in_a_row(history, lambda kind: kind is FailureKind.NETWORK)
        if tries > max_network_retries:
            return Stop(ExitCode.BUDGET_SPENT, f"{tries} network failures without a new checkpoint: {failure.cause}")
        # Unlike other failures, the first one waits, too: at once, the server would only give the same answer.
        return Restart(tries + 1, failure.cause, batch)
    if len(history) > 1 and failure.fingerprint and history[-2].failure.fingerprint == failure.fingerprint:
        if failure.window is not None and skips_left > 0:
            # Bounded by itself, too.
            first, last = failure.window
            return Restart(
                in_a_row, f"{failure.cause}: twice, so steps {first} to {last} are skipped", batch, failure.window
            )
        return Stop(ExitCode.DETERMINISTIC, f"the same failure at step {failure.step} twice: {failure.cause}")
    if in_a_row > max_restarts:
        if history[-1].committed_step < 0:
            return Stop(ExitCode.NO_PROGRESS, f"{in_a_row} failures and not one checkpoint: {failure.cause}")
        nearer = any(record.committed_step != history[-1].committed_step for record in history[-in_a_row:])
        where = f"at step {failure.step}" if nearer else "without a new checkpoint"
        return Stop(ExitCode.BUDGET_SPENT, f"{in_a_row} failures {where}: {failure.cause}")
    return Restart(in_a_row, failure.cause, batch)


def end_of_node(decision: Stop, node: int, bad_nodes: Collection[int]) -> Stop:
    """How one node of a run ends, given how the run ends.

    Whatever restarts the nodes counts failures by node, and moves the one that exits with `BAD_NODE` elsewhere. The
    others are healthy, so they exit with `PREEMPTED`, which costs nothing.

    Args:
        node: its rank among the nodes.
        bad_nodes: those whose hardware or driver has failed; empty in a run of one node.
    """
    if decision.exit_code is not ExitCode.BAD_NODE or not bad_nodes or node in bad_nodes:
        return decision
    names = ", ".join(map(str, sorted(bad_nodes)))
    cause = decision.reason.partition(": ")[2]
    return Stop(ExitCode.PREEMPTED, f"node {names} is at fault; the same command continues on a replacement: {cause}")


def failures_in_a_row(history: Sequence[AttemptRecord], *, can_cut: bool = True) -> int:
    """Failures at the end of `history` that brought the run no further; those bounded in another way cost none."""
    bounded = _OWN_BOUNDS if can_cut else _OWN_BOUNDS - {FailureKind.OUT_OF_MEMORY}
    return _in_a_row(history, lambda kind: kind not in bounded)


def _in_a_row(history: Sequence[AttemptRecord], counts: Callable[[FailureKind], bool]) -> int:
    last = history[-1]
    no_further = itertools.takewhile(
        lambda record: record.committed_step == last.committed_step or _same_place(record.failure, last.failure),
        reversed(history),
    )
    return sum(counts(record.failure.kind) for record in no_further)


def _same_place(one: Failure, other: Failure) -> bool:
    return one.step > 0 and one.kind not in _OWN_BOUNDS and (one.kind, one.step) == (other.kind, other.step)


def backoff_s(
    failures_in_a_row: int, *, initial_s: float, max_s: float, jitter_s: float, source: random.Random | None = None
) -> float:
    """How long to wait before the next attempt: not at all after a first failure, then doubling, with jitter."""
    if failures_in_a_row <= 1:
        return 0.0
    return min(initial_s * 2.0 ** min(failures_in_a_row - 2, 60) + (source or random).uniform(0.0, jitter_s), max_s)
