"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    OK = "ok"
    WARN = "warn"  # the run may be slow, or fail under some circumstances
    FAIL = "fail"  # the run would fail


@dataclass(frozen=True)
class Finding:
    """One line. `mend` says what to do, where there is something."""

    level: Level
    subject: str
    text: str
    mend: str = ""


def ok(subject: str, text: str) -> Finding:
    return Finding(Level.OK, subject, text)


def warn(subject: str, text: str, mend: str) -> Finding:
    return Finding(Level.WARN, subject, text, mend)


def fail(subject: str, text: str, mend: str) -> Finding:
    return Finding(Level.FAIL, subject, text, mend)
