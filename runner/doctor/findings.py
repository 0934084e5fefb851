"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"  # The run may be slow, or fail under some circumstances.
    FAIL = "fail"  # The run would fail.


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was checked, what was found, and what to do about it, if anything."""

    level: Level
    subject: str
    text: str
    fix: str = ""


def ok(subject: str, text: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(Level.OK, subject, text)


def warn(subject: str, text: str, fix: str) -> Finding:
    """Return a finding that may slow the run down or make it fail."""
    return Finding(Level.WARN, subject, text, fix)


def fail(subject: str, text: str, fix: str) -> Finding:
    """Return a finding that makes the run fail."""
    return Finding(Level.FAIL, subject, text, fix)
