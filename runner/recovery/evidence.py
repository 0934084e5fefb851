"""What ended ranks leave behind: exit codes, error files, last words."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What a process that is ended by its own C++ code, or by a fault of it, leaves on its standard error.
_TERMINATED = re.compile(r"terminate called after throwing an instance of '([^'\n]+)'\s+what\(\):\s+([^\n]+)")
_FATAL = re.compile(r"^(Fatal Python error: [^\n]+)", re.MULTILINE)
_LAST_BYTES = 256 * 1024
_MAX_WORDS = 300


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
