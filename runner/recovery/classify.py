"""Find out why an attempt ended: exit codes, error files and last lines of standard error in, a `Failure` out."""

from __future__ import annotations

import json
import linecache
import re
import signal
import sysconfig
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpointing.errors import EXIT_PREEMPTED
from checkpointing.host.limits import explained
from runner.recovery.failure import Failure, is_effect
from runner.recovery.kinds import FailureKind, kind_of_error
from runner.system.text import visible

# A GPU in exclusive mode, while a process that was killed is not gone yet.
_BUSY = re.compile(r"busy or unavailable", re.IGNORECASE)

# The driver was started in the process that ranks are forked from: torch's message, and the driver's own.
_BAD_FORK = re.compile(r"Cannot re-initialize \w+ in forked subprocess|(CUDA|HIP) error: initialization error")

_RAISE = re.compile(r"\s*raise\b")
# Types that say by themselves what has happened.
_EVIDENT = re.compile(
    r"(?:\w+\.)*(OutOfMemoryError|MemoryError|OSError|\w*BackendError|AcceleratorError|SafetensorError|NVMLError)\b"
)
# Said between the tracebacks of an exception and of the one that answers it.
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
# Where libraries are, and this project.
_LIBRARIES = [
    *{Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    *(Path(__file__).resolve().parents[2] / name for name in ("checkpointing", "runner")),
]

_MAX_CAUSE = 500
# Written to standard error by a process that C++ code aborts, or that crashes by a fault of its own.
_TERMINATED = re.compile(r"terminate called after throwing an instance of '([^'\n]+)'\s+what\(\):\s+([^\n]+)")
_FATAL = re.compile(r"^(Fatal Python error: [^\n]+)", re.MULTILINE)
_LAST_BYTES = 256 * 1024
_MAX_WORDS = 300
# What torch makes of an exception of a data loader's worker; and a frame in it.
_FROM_WORKER = re.compile(
    r"\w+: Caught (?P<type>\S+) in (?P<where>.+)\.\nOriginal Traceback \(most recent call last\):\n"
)
_FRAME = re.compile(r'^  File "(?P<path>.+)", line (?P<line>\d+), in .*$', re.MULTILINE)

# Steps of which nothing is kept: `NonFinite` and `LossSpike` of `checkpointing.errors`.
_BAD_STEP = re.compile(r"(NonFinite|LossSpike): .*? of step (\d{1,15}) ")
_BAD_STEPS = {"NonFinite": FailureKind.NON_FINITE, "LossSpike": FailureKind.SPIKE}

_EXTERNAL_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended."""

    rank: int  # Global rank.
    order: int  # Position among the ranks by the time of death, 0 for the first.
    # As `multiprocessing` reports it (negative for a signal); None if only the death was seen.
    exit_code: int | None = None
    error: str | None = None  # Type and message of its Python exception; None if there is none.
    frame: str | None = None  # `file:line` of the exception's innermost frame; None if it is unknown.
    # When the exception was recorded, in seconds since the epoch; None if it is unknown.
    error_time: float | None = None
    # For a process without a Python exception, why it was aborted; None if it did not say.
    last_words: str | None = None
    raised_by_program: bool = False  # Whether a statement of the program raised it, and no library.
    transient: bool = False  # Whether the exception means that the network or a server has failed, which may pass.


def classify(
    ends: Sequence[RankEnd],
    *,
    finished: bool,
    started_step: int,
    step: int,
    has_stepped: bool = False,
    kernel_oom_kills: int = 0,
    idle: Set[int] = frozenset(),
) -> Failure:
    """Find the cause of an attempt's end.

    Args:
        ends: The ranks that died, in any order.
        finished: Whether all ranks exited with status 0.
        started_step: Step that the attempt started from.
        step: Its last finished step.
        has_stepped: Whether it has trained, though its steps are not known.
        kernel_oom_kills: Processes of this cgroup that the kernel killed meanwhile for lack of memory.
        idle: Ranks that ran no training step when they ended.
    """
    if finished:
        return Failure(FailureKind.FINISHED, "all ranks finished", step=step)
    # torchrun reports one exit status; ranks that it then ends have none, or that of its signal.
    stops = (None, EXIT_PREEMPTED, -signal.SIGTERM)
    if any(end.exit_code == EXIT_PREEMPTED for end in ends) and min(ends, key=lambda end: end.order).exit_code in stops:
        return Failure(FailureKind.PREEMPTED, "stopped on request, checkpoint committed", step=step)
    if not ends:
        return Failure(FailureKind.LAUNCHER_LOST, "the attempt ended without a report from any rank", step=step)
    failure = _classify_cause(_first_cause(ends), started_step, step, has_stepped, kernel_oom_kills)
    if failure.kind is FailureKind.OUT_OF_MEMORY and failure.rank in idle:
        return _outside_steps(failure)
    early = failure.kind is FailureKind.OUT_OF_MEMORY and step <= started_step
    busy = failure.kind is FailureKind.BAD_NODE and bool(_BUSY.search(failure.cause))
    in_fork = bool(_BAD_FORK.search(failure.cause))
    return replace(failure, may_pass=early or busy or in_fork, in_fork=in_fork)


def _outside_steps(failure: Failure) -> Failure:
    """Return the lack of memory of a rank that ran no training step."""
    kind = FailureKind.MEMORY_OUTSIDE_STEPS
    # The kernel's victim has no frame, and evaluates the same samples again.
    signature = f"{kind.value}|{failure.step}"
    return replace(failure, kind=kind, cause=failure.cause + kind.rule.advice, signature=signature)


def _classify_cause(first: RankEnd, started_step: int, step: int, has_stepped: bool, kernel_oom_kills: int) -> Failure:
    if first.error is None and first.last_words is not None:
        cause = f"rank {first.rank} was aborted: {first.last_words}"
        # A connection may break at any step, and again.
        signature = "" if is_effect(cause) else f"{first.last_words.partition(':')[0]}|{step}"
        return Failure(kind_of_error(first.last_words) or FailureKind.CRASHED, cause, first.rank, step, signature)
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
    signature = "" if is_effect(first.error) else f"{first.error.partition(':')[0]}|{first.frame}|{step}"
    # What a program says in its own words is no evidence of what the device, the disk or the memory did.
    known = kind_of_error(first.error) if not first.raised_by_program else None
    if first.error.startswith("DamagedCheckpoint"):
        # It was quarantined, so that each attempt finds another one.
        return Failure(FailureKind.CRASHED, cause, first.rank, step)
    if first.error.startswith("StorageUnreachable") and known is not FailureKind.STORAGE_FAILED:
        # It may answer again by the next attempt, before the first step or in the middle.
        return Failure(FailureKind.CRASHED, cause, first.rank, step)
    if found := _BAD_STEP.match(first.error):
        # The error names its step, and may be noticed one step later.
        kind, bad = _BAD_STEPS[found[1]], int(found[2])
        window = (min(started_step + 1, bad), bad)
        return Failure(kind, cause, first.rank, step, f"{found[1]}|{bad}", window)
    if known is not None:
        limit = explained(first.error) if known is FailureKind.LIMITED else ""
        return Failure(known, cause + known.rule.advice + limit, first.rank, step, signature)
    if first.transient:
        return Failure(FailureKind.NETWORK, cause, first.rank, step)
    before_first_step = step == 0 and started_step == 0 and not has_stepped and not is_effect(first.error)
    kind = FailureKind.BOOT if before_first_step else FailureKind.CRASHED
    return Failure(kind, cause, first.rank, step, signature)


def _one_line(error: str) -> str:
    """Shorten an error to one line; the whole text is in the rank's log."""
    # An exception without a text has a colon at its end.
    text = visible(" ".join(error.split()).removesuffix(":"))
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


def raised_by_program(error: str, frame: str | None, error_file: Path) -> bool:
    """Return whether an error's words are the program's own, as far as its torchelastic error file says.

    Its innermost frame, `file:line`, is then a `raise` in the program's files, of no type that is evidence by itself,
    and not in the answer to another exception, whose words it may repeat.
    """
    path, _, line = (frame or "").rpartition(":")
    is_library = re.search(r"/(site|dist)-packages/", path) or any(map(Path(path).is_relative_to, _LIBRARIES))
    if not line.isdecimal() or is_library or _EVIDENT.match(error):
        return False
    try:
        if any(words in error_file.read_text(errors="replace") for words in _CHAINED):
            return False
    except OSError:
        return False
    linecache.checkcache(path)
    return _RAISE.match(linecache.getline(path, int(line))) is not None


def of_its_origin(error: str, frame: str | None) -> tuple[str, str | None]:
    """Return error and frame of what a data loader's worker has raised, where an error is only its messenger.

    The worker's traceback is in the message, which is cut where it is shown in one line.
    """
    if (found := _FROM_WORKER.match(error)) is None or not (frames := list(_FRAME.finditer(error, found.end()))):
        return error, frame
    path, line, end = frames[-1]["path"], frames[-1]["line"], frames[-1].end()
    words = re.compile(rf"^(?:[\w.]+\.)?{re.escape(found['type'])}(?::|$)", re.MULTILINE).search(error, end)
    if words is None:
        return error, frame
    text = error[words.start() :].strip()
    # What is before the colon is the type, by which failures are compared.
    text = text if words.group().endswith(":") else f"{text}:"
    return f"{text} (in {found['where']})", f"{path}:{line}"


def printable(text: str) -> str:
    """Return a text with what UTF-8 cannot encode, such as a byte of a file name, as an escape sequence."""
    return text.encode(errors="backslashreplace").decode()


def read_error_file(path: Path) -> tuple[str, str | None, float | None] | None:
    """Read a torchelastic error file.

    Returns:
        Error, innermost frame (None if unknown) and time in seconds since the epoch (None if unknown); None if the file
        does not exist or is damaged.
    """
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        message = document["message"]
        if isinstance(message, str):
            return printable(message), None, None
        extra = message["extraInfo"]
        frames = re.findall(r'File "([^"]+)", line (\d+)', printable(extra["py_callstack"]))
        frame = ":".join(frames[-1]) if frames else None
        return *of_its_origin(printable(message["message"]), frame), float(extra["timestamp"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def read_last_words(log: Path) -> str | None:
    """Return why a process was aborted, by the end of its standard error in this file; None if that does not say."""
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
