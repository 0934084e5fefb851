"""From what is left of an attempt to why it ended. Pure: exit statuses and error files in, a `Failure` out."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from checkpointing.errors import EXIT_PREEMPTED


class FailureKind(Enum):
    FINISHED = "finished"
    PREEMPTED = "preempted"
    ENDED = "ended at once"  # by a stop request that left no time, or nothing, to save
    CRASHED = "crashed"  # a signal, a lost peer, an error in mid-training
    OUT_OF_MEMORY = "out of memory"  # of the GPU, of the process, or of its cgroup
    NON_FINITE = "non-finite gradients"  # the second time at the same step: its data, or the learning rate
    SPIKE = "loss spike"  # likewise
    HUNG = "hung"  # no sign of life within the deadline of its phase
    NETWORK = "network failure"  # a server or the network did not answer a rank; may have passed by the next attempt
    BOOT = "boot failure"  # a Python error before the first step: it would come again
    NO_VALID_CHECKPOINT = "no valid checkpoint"
    FENCED = "fenced"  # a newer attempt of this run has begun elsewhere
    STORAGE_FAILED = (
        "storage failed"  # too many saves in a row, training ended in good order; or a rank met a full disk
    )
    AGENT_LOST = "checkpoint agent lost"
    LAUNCHER_LOST = "launcher lost"
    NODE_LOST = "node lost"  # another machine is silent or gone
    RUNNER_LOST = "runner lost"  # an earlier `runner start` ended without a word
    BAD_NODE = "bad node"  # this machine's hardware or driver is at fault


# What a rank raises when another rank has gone: an effect, never the cause.
_CASCADE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|socket closed|gloo|nccl|DistNetworkError|DistStoreError"
    r"|DistBackendError|AgentUnavailable",
    re.IGNORECASE,
)

# A rank's own, also where NCCL's watchdog is the one that tells: "Process group watchdog thread terminated with
# exception: CUDA error: an illegal memory access was encountered".
_OF_OWN_DEVICE = re.compile(r"CUDA error: |HIP error: ")

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

# What a process that is ended by its own C++ code, or by a fault of it, leaves on its standard error.
_TERMINATED = re.compile(r"terminate called after throwing an instance of '([^'\n]+)'\s+what\(\):\s+([^\n]+)")
_FATAL = re.compile(r"^(Fatal Python error: [^\n]+)", re.MULTILINE)
_LAST_BYTES = 256 * 1024
_MAX_WORDS = 300
_MAX_CAUSE = 500

# Steps of which nothing is kept: `NonFinite` and `LossSpike` of `checkpointing.errors`.
_BAD_STEP = re.compile(r"(NonFinite|LossSpike): .*? of step (\d{1,15}) ")
_BAD_STEPS = {"NonFinite": FailureKind.NON_FINITE, "LossSpike": FailureKind.SPIKE}

# A machine that was told to end, or that ended because another one was silent.
_EFFECTS = {FailureKind.ENDED, FailureKind.NODE_LOST}
_EXTERNAL_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        order: position among the ranks by the time of death, 0 is the first.
        exit_code: as `multiprocessing` gives it (negative: signal number); None where only the death was seen.
        error: type and message of its Python exception, None where it left none.
        frame: `file:line` of the exception's innermost frame.
        error_time: when the exception was recorded, seconds since the epoch.
        last_words: of a process without such an exception, ended by an abort or a fault of its own.
        transient: the exception says that the network, or a server, has failed for the moment.
    """

    rank: int
    order: int
    exit_code: int | None = None
    error: str | None = None
    frame: str | None = None
    error_time: float | None = None
    last_words: str | None = None
    transient: bool = False


# First and last step.
Window = tuple[int, int]


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended.

    Attributes:
        step: last finished step of the attempt.
        fingerprint: equal for equal failures at the same step; empty for what says nothing about the next attempt.
        window: first and last step to be passed over should it come again; None where that would not help.
        may_pass: what has failed may be as it should be a moment later, though it is not the kind that is: memory that
            was short before a step had ended, a GPU that another process still held. Worth one more try, unchanged.
        in_fork: an accelerator cannot be used in a process that was forked: ranks are to be fresh interpreters.
    """

    kind: FailureKind
    cause: str
    rank: int | None = None
    step: int = 0
    fingerprint: str = ""
    window: Window | None = None
    may_pass: bool = False
    in_fork: bool = False

    @property
    def is_effect(self) -> bool:
        """It may be what a failure elsewhere has led to."""
        return self.kind in _EFFECTS or (self.kind is FailureKind.CRASHED and is_effect(self.cause))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "kind": self.kind.value}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Failure:
        """
        Raises:
            ValueError, KeyError, TypeError, OverflowError: `to_dict` did not make it.
        """
        rank, cause = fields["rank"], str(fields["cause"])
        cause.encode()  # it will be printed
        return cls(
            FailureKind(fields["kind"]),
            cause,
            int(rank) if rank is not None else None,
            int(fields["step"]),
            str(fields["fingerprint"]),
            read_window(fields["window"]) if fields.get("window") is not None else None,
            fields.get("may_pass") is True,
            fields.get("in_fork") is True,
        )


def read_window(value: Any) -> Window:
    """Two steps.

    Raises:
        ValueError, TypeError: they are none.
    """
    first, last = value
    if type(first) is not int or type(last) is not int or not 0 < first <= last < 2**53:
        raise ValueError(f"no window of steps: {value!r}")
    return first, last


def _distance_from_cause(failure: Failure) -> int:
    """A lost machine makes the others' ranks hang; both make ranks lose their connections."""
    later = [FailureKind.NODE_LOST, FailureKind.HUNG, FailureKind.CRASHED, FailureKind.ENDED]
    is_cause = not failure.is_effect and failure.kind is not FailureKind.HUNG
    return 0 if is_cause else 1 + later.index(failure.kind)


def combine(failures: Sequence[Failure]) -> Failure:
    """One failure of several machines' for one attempt, the first machine's first: a cause goes before its effects.

    Finished and preempted count only if all machines say so.
    """
    step = max(failure.step for failure in failures)
    good = (FailureKind.FINISHED, FailureKind.PREEMPTED)
    bad = [failure for failure in failures if failure.kind not in good]
    if not bad:
        # Those that had finished before the others agreed to stop have nothing left to do.
        chosen = next((failure for failure in failures if failure.kind is FailureKind.PREEMPTED), failures[0])
    else:
        chosen = min(bad, key=_distance_from_cause)
    return replace(chosen, step=step)


def read_error_file(path: Path) -> tuple[str, str | None, float | None] | None:
    """Error, innermost frame and time from a torchelastic error file; None where there is none to read."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        message = document["message"]
        if isinstance(message, str):
            return message, None, None
        extra = message["extraInfo"]
        frames = re.findall(r'File "([^"]+)", line (\d+)', extra["py_callstack"])
        frame = ":".join(frames[-1]) if frames else None
        return message["message"], frame, float(extra["timestamp"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_last_words(log: Path) -> str | None:
    """Why a process was aborted, by the end of its standard error; None where that says nothing of the kind."""
    try:
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - _LAST_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    thrown = _TERMINATED.findall(text)
    if thrown:
        return ": ".join(thrown[-1])[:_MAX_WORDS]
    fatal = _FATAL.findall(text)
    return str(fatal[-1])[:_MAX_WORDS] if fatal else None


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


def is_effect(error: str) -> bool:
    """Whether a rank's error is what it says when another rank has gone."""
    return bool(_CASCADE.search(error)) and not _OF_OWN_DEVICE.search(error)


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
