"""Evidence of a rank's end: exit codes, error files, and the last lines of its standard error."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: Global rank.
        order: Position among the ranks by the time of death, 0 for the first.
        exit_code: As `multiprocessing` reports it (negative for a signal); None if only the death was seen.
        error: Type and message of its Python exception; None if there is none.
        frame: `file:line` of the exception's innermost frame; None if it is unknown.
        error_time: When the exception was recorded, in seconds since the epoch; None if it is unknown.
        last_words: For a process without a Python exception, why it was aborted; None if it did not say.
        transient: Whether the exception means that the network or a server has failed, which may pass.
    """

    rank: int
    order: int
    exit_code: int | None = None
    error: str | None = None
    frame: str | None = None
    error_time: float | None = None
    last_words: str | None = None
    transient: bool = False


def of_its_origin(error: str, frame: str | None) -> tuple[str, str | None]:
    """Return what a data loader's worker has raised, where an error is only its messenger.

    Its traceback is in the message, which is cut where it is shown in one line.

    Args:
        error: Type and message.
        frame: Innermost frame.
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

    Args:
        path: The file.

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
    """Find why a process was aborted, in the last 256 KiB of its standard error.

    Args:
        log: File with its standard error.

    Returns:
        The reason; None if there is none.
    """
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
