"""From what is left of an attempt to why it ended. Pure: exit statuses and error files in, a `Failure` out."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace

from checkpointing.errors import EXIT_PREEMPTED
from runner.recovery.evidence import RankEnd
from runner.recovery.kinds import Failure, FailureKind, is_effect

# Of the device, of the host, and of a process that may not have more.
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|^MemoryError|bad_alloc|can.t allocate memory|Cannot allocate memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
# What another try on the same machine would only meet again.
_BAD_NODE = re.compile(
    r"uncorrectable (ECC|NVLink) error|ECC error|GPU (has )?fallen off the bus|device is lost|hardware error"
    r"|CUDA driver version is insufficient|Unable to determine the device handle|system not yet initialized"
    r"|nvmlInit.*fail|busy or unavailable|GPU is lost|No CUDA GPUs are available|CUDA unknown error",
    re.IGNORECASE,
)

# In exclusive mode, while a process that was killed is not gone yet.
_BUSY = re.compile(r"busy or unavailable", re.IGNORECASE)

# The driver was started in the process that ranks are forked from: torch's words, and the driver's own.
_BAD_FORK = re.compile(r"Cannot re-initialize \w+ in forked subprocess|(CUDA|HIP) error: initialization error")

# Python's, and Rust's (tokenizers, safetensors).
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded|\(os error (28|122)\)|\[Errno (28|122)\]")

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
        ends: the ranks that died, in any order.
        finished: all ranks ended with status 0.
        started_step: step that the attempt started from.
        step: its last finished step.
        kernel_oom_kills: processes that the kernel has ended in this cgroup meanwhile, for want of memory.
    """
    if finished:
        return Failure(FailureKind.FINISHED, "all ranks finished", step=step)
    # torchrun tells one exit status; those that it then ends have none, or that of its signal.
    stops = (None, EXIT_PREEMPTED, -signal.SIGTERM)
    if any(end.exit_code == EXIT_PREEMPTED for end in ends) and min(ends, key=lambda end: end.order).exit_code in stops:
        return Failure(FailureKind.PREEMPTED, "stopped on request, checkpoint committed", step=step)
    if not ends:
        return Failure(FailureKind.LAUNCHER_LOST, "the attempt ended without a word from any rank", step=step)
    failure = _classify_cause(_first_cause(ends), started_step, step, kernel_oom_kills)
    early = failure.kind is FailureKind.OUT_OF_MEMORY and step <= started_step
    busy = failure.kind is FailureKind.BAD_NODE and bool(_BUSY.search(failure.cause))
    in_fork = bool(_BAD_FORK.search(failure.cause))
    return replace(failure, may_pass=early or busy or in_fork, in_fork=in_fork)


def _classify_cause(first: RankEnd, started_step: int, step: int, kernel_oom_kills: int) -> Failure:
    if first.error is None and first.last_words is not None:
        cause = f"rank {first.rank} was aborted: {first.last_words}"
        # A connection that breaks may do so at any step, and again.
        fingerprint = "" if is_effect(cause) else f"{first.last_words.partition(':')[0]}|{step}"
        return Failure(_kind_of(first.last_words) or FailureKind.CRASHED, cause, first.rank, step, fingerprint)
    if first.error is None:
        cause = _describe_exit(first)
        # A kill comes from outside and may strike at any step; a crash of the program itself repeats.
        if kernel_oom_kills and first.exit_code in (None, -signal.SIGKILL):
            cause = (
                f"rank {first.rank} was killed by the kernel: the memory limit of this machine or container is reached"
            )
            return Failure(FailureKind.OUT_OF_MEMORY, cause, first.rank, step)
        own_fault = first.exit_code is not None and -first.exit_code not in _EXTERNAL_SIGNALS
        return Failure(FailureKind.CRASHED, cause, first.rank, step, f"{cause}|{step}" if own_fault else "")
    cause = f"rank {first.rank}: {_one_line(first.error.removeprefix('SystemExit: '))}"
    fingerprint = "" if is_effect(first.error) else f"{first.error.partition(':')[0]}|{first.frame}|{step}"
    if first.error.startswith("NoValidCheckpoint"):
        kind = FailureKind.NO_VALID_CHECKPOINT
    elif first.error.startswith("StorageUnreachable"):
        # It may be back by the next attempt, before the first step or in the middle.
        return Failure(FailureKind.CRASHED, cause, first.rank, step)
    elif found := _BAD_STEP.match(first.error):
        # It names its step itself, and may be seen one later.
        kind, bad = _BAD_STEPS[found[1]], int(found[2])
        window = (min(started_step + 1, bad), bad)
        return Failure(kind, cause, first.rank, step, f"{found[1]}|{bad}", window)
    elif _DISK_FULL.search(first.error):
        return Failure(FailureKind.STORAGE_FAILED, f"{cause}; make room, then start again", first.rank, step)
    elif known := _kind_of(first.error):
        kind = known
    elif first.transient:
        return Failure(FailureKind.NETWORK, cause, first.rank, step)
    elif step == 0 and started_step == 0 and not is_effect(first.error):
        kind = FailureKind.BOOT
    else:
        kind = FailureKind.CRASHED
    return Failure(kind, cause, first.rank, step, fingerprint)


def _one_line(error: str) -> str:
    """The whole text is in the rank's log; an exception without one has a colon at its end."""
    text = " ".join(error.split()).removesuffix(":")
    return text if len(text) <= _MAX_CAUSE else f"{text[:_MAX_CAUSE]} …"


def _kind_of(error: str) -> FailureKind | None:
    if _OUT_OF_MEMORY.search(error):
        return FailureKind.OUT_OF_MEMORY
    return FailureKind.BAD_NODE if _BAD_NODE.search(error) else None


def _first_cause(ends: Sequence[RankEnd]) -> RankEnd:
    """The rank that failed first: one with an error of its own, or one that died by a signal, before any cascade."""

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
