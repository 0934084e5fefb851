"""Find out why an attempt ended. Pure: exit statuses and error files in, a `Failure` out."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace

from checkpointing.errors import EXIT_PREEMPTED
from runner.recovery.evidence import RankEnd
from runner.recovery.failure import Failure, is_effect
from runner.recovery.kinds import FailureKind, kind_of_error

# A GPU in exclusive mode, while a process that was killed is not gone yet.
_BUSY = re.compile(r"busy or unavailable", re.IGNORECASE)

# The driver was started in the process that ranks are forked from: torch's message, and the driver's own.
_BAD_FORK = re.compile(r"Cannot re-initialize \w+ in forked subprocess|(CUDA|HIP) error: initialization error")

_MAX_CAUSE = 500

# Steps of which nothing is kept: `NonFinite` and `LossSpike` of `checkpointing.errors`.
_BAD_STEP = re.compile(r"(NonFinite|LossSpike): .*? of step (\d{1,15}) ")
_BAD_STEPS = {"NonFinite": FailureKind.NON_FINITE, "LossSpike": FailureKind.SPIKE}

_EXTERNAL_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


def classify(
    ends: Sequence[RankEnd], *, finished: bool, started_step: int, step: int, kernel_oom_kills: int = 0
) -> Failure:
    """Find the cause of an attempt's end.

    Args:
        ends: The ranks that died, in any order.
        finished: Whether all ranks exited with status 0.
        started_step: Step that the attempt started from.
        step: Its last finished step.
        kernel_oom_kills: Processes of this cgroup that the kernel killed meanwhile for lack of memory.
    """
    if finished:
        return Failure(FailureKind.FINISHED, "all ranks finished", step=step)
    # torchrun reports one exit status; ranks that it then ends have none, or that of its signal.
    stops = (None, EXIT_PREEMPTED, -signal.SIGTERM)
    if any(end.exit_code == EXIT_PREEMPTED for end in ends) and min(ends, key=lambda end: end.order).exit_code in stops:
        return Failure(FailureKind.PREEMPTED, "stopped on request, checkpoint committed", step=step)
    if not ends:
        return Failure(FailureKind.LAUNCHER_LOST, "the attempt ended without a report from any rank", step=step)
    failure = _classify_cause(_first_cause(ends), started_step, step, kernel_oom_kills)
    early = failure.kind is FailureKind.OUT_OF_MEMORY and step <= started_step
    busy = failure.kind is FailureKind.BAD_NODE and bool(_BUSY.search(failure.cause))
    in_fork = bool(_BAD_FORK.search(failure.cause))
    return replace(failure, may_pass=early or busy or in_fork, in_fork=in_fork)


def _classify_cause(first: RankEnd, started_step: int, step: int, kernel_oom_kills: int) -> Failure:
    if first.error is None and first.last_words is not None:
        cause = f"rank {first.rank} was aborted: {first.last_words}"
        # A connection may break at any step, and again.
        fingerprint = "" if is_effect(cause) else f"{first.last_words.partition(':')[0]}|{step}"
        return Failure(kind_of_error(first.last_words) or FailureKind.CRASHED, cause, first.rank, step, fingerprint)
    if first.error is None:
        cause = _describe_exit(first)
        # A kill comes from outside and can happen at any step; a crash of the program itself repeats.
        if kernel_oom_kills and first.exit_code in (None, -signal.SIGKILL):
            cause = (
                f"rank {first.rank} was killed by the kernel: the memory limit of this node or container was reached"
            )
            return Failure(FailureKind.OUT_OF_MEMORY, cause, first.rank, step)
        own_fault = first.exit_code is not None and -first.exit_code not in _EXTERNAL_SIGNALS
        return Failure(FailureKind.CRASHED, cause, first.rank, step, f"{cause}|{step}" if own_fault else "")
    cause = f"rank {first.rank}: {_one_line(first.error.removeprefix('SystemExit: '))}"
    fingerprint = "" if is_effect(first.error) else f"{first.error.partition(':')[0]}|{first.frame}|{step}"
    known = kind_of_error(first.error)
    if first.error.startswith("StorageUnreachable") and known is not FailureKind.STORAGE_FAILED:
        # It may answer again by the next attempt, before the first step or in the middle.
        return Failure(FailureKind.CRASHED, cause, first.rank, step)
    if found := _BAD_STEP.match(first.error):
        # The error names its step, and may be noticed one step later.
        kind, bad = _BAD_STEPS[found[1]], int(found[2])
        window = (min(started_step + 1, bad), bad)
        return Failure(kind, cause, first.rank, step, f"{found[1]}|{bad}", window)
    if known is not None:
        return Failure(known, cause + known.rule.advice, first.rank, step, fingerprint)
    if first.transient:
        return Failure(FailureKind.NETWORK, cause, first.rank, step)
    before_first_step = step == 0 and started_step == 0 and not is_effect(first.error)
    kind = FailureKind.BOOT if before_first_step else FailureKind.CRASHED
    return Failure(kind, cause, first.rank, step, fingerprint)


def _one_line(error: str) -> str:
    """Shorten an error to one line; the whole text is in the rank's log."""
    # An exception without a text has a colon at its end.
    text = " ".join(error.split()).removesuffix(":")
    return text if len(text) <= _MAX_CAUSE else f"{text[:_MAX_CAUSE]} …"


def _first_cause(ends: Sequence[RankEnd]) -> RankEnd:
    """Return the rank that failed first: one with an error of its own, or killed by a signal, before any cascade."""

    def is_cascade(end: RankEnd) -> bool:
        return is_effect(end.error or end.last_words or "")

    return min(ends, key=lambda end: (is_cascade(end), end.order, end.error_time or 0.0))


def _describe_exit(end: RankEnd) -> str:
    code = end.exit_code
    if code is None:
        return f"rank {end.rank} died without an error message (killed)"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"rank {end.rank} was killed by {name}"
    return f"rank {end.rank} exited with status {code}"
