"""Journals for tests, written as their lines are: what a line means is `runner.journal.events`' business."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from checkpointing.agent.events import Event
from runner.journal.events import Entry, Malformed, parse, parse_event


def entry(time: float, event: str, attempt: int = 1, **details: Any) -> Entry:
    """Return the entry of one line."""
    parsed = parse({"time": time, "event": event, "attempt": attempt, **details})
    assert parsed is not None
    return parsed


def event(name: str, **details: Any) -> Event:
    """Return an event by its name in journals."""
    parsed = parse_event(name, details)
    assert not isinstance(parsed, Malformed), parsed
    return parsed


def entries(lines: Iterable[Mapping[str, Any]]) -> list[Entry]:
    """Return the entries of lines, as a reader of the journal sees them."""
    found: list[Entry] = []
    for line in lines:
        parsed = parse(line, found[-1] if found else None)
        found += [parsed] if parsed is not None else []
    return found
