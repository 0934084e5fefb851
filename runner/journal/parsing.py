"""Lines of a journal, and messages between processes, as events; also those of older and newer versions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from checkpointing.agent.events import Event, MeasuredEvent
from runner.journal.events import Entry, Malformed, UnknownEvent

# Names that events and fields had in journals of older versions.
_RENAMED_EVENTS = {"checkpoint_set_aside": "checkpoint_quarantined", "note_failed": "restart_state_failed"}
_RENAMED_FIELDS = {("resumed", "from"): "source"}
# Keys of every line; a message between processes may carry them too. They are not metrics.
_LINE_KEYS = ("time", "event", "attempt")
_adapters: dict[str, TypeAdapter[Any]] = {}


def parse(line: Mapping[str, Any], before: Entry | None = None) -> Entry | None:
    """Parse one line of a journal.

    Args:
        line: The line's JSON object.
        before: The entry of the line before, if there is one.

    Returns:
        The entry; None if the line is damaged and there is no time to record that under.
    """
    time, attempt, name = _time(line.get("time")), line.get("attempt", 0), line.get("event")
    if time is None:
        return _malformed(before, "has no time")
    if not isinstance(attempt, int) or not 0 <= attempt < 2**53:
        return Entry(time, before.attempt if before is not None else 0, Malformed(problem=f"attempt={attempt!r}"))
    if not isinstance(name, str):
        return Entry(time, attempt, Malformed(problem="has no event"))
    details = {key: value for key, value in line.items() if key not in _LINE_KEYS}
    return Entry(time, attempt, parse_event(name, details))


def parse_event(name: str, details: Mapping[str, Any]) -> Event:
    """Parse an event.

    Args:
        name: Its name, perhaps one of an older version.
        details: Its fields.

    Returns:
        The event, `UnknownEvent` for a name that this version does not know, or `Malformed`.
    """
    details = {_RENAMED_FIELDS.get((name, key), key): value for key, value in details.items()}
    name = _RENAMED_EVENTS.get(name, name)
    known = Event.known.get(name)
    if known is None:
        return UnknownEvent(event=name, details=details)
    if issubclass(known, MeasuredEvent):
        details = _with_metrics(known, details)
    try:
        event: Event = _adapter(name).validate_python(details)
    except (ValidationError, RecursionError) as error:
        return Malformed(problem=f"{name}: {error}")
    return event


def undecodable(before: Entry | None) -> Entry | None:
    """Return the entry of a line that is no JSON object; None for the first line of a journal."""
    return _malformed(before, "is not a JSON object")


def _malformed(before: Entry | None, problem: str) -> Entry | None:
    return Entry(before.time, before.attempt, Malformed(problem=problem)) if before is not None else None


def _with_metrics(known: type[Event], details: Mapping[str, Any]) -> dict[str, Any]:
    """Collect what is no field of the event in `metrics`."""
    own = {entry.name for entry in fields(known)} - {"metrics"}
    metrics = {
        key: value for key, value in details.items() if key not in own and key not in _LINE_KEYS and _is_finite(value)
    }
    return {**{key: value for key, value in details.items() if key in own}, "metrics": metrics}


def _is_finite(value: object) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:
        return False


def _time(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e12 else None


def _adapter(name: str) -> TypeAdapter[Any]:
    if name not in _adapters:
        _adapters[name] = TypeAdapter(Event.known[name])
    return _adapters[name]
