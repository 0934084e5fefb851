"""Lines of journals become typed events: old names are read, unknown events kept, damaged ones counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_type_hints

import pytest

import checkpointing.agent.events
from checkpointing.agent.events import CheckpointQuarantined, Event, Log, Resumed
from runner.journal import events
from runner.journal.events import Entry, Malformed, RunStarted, UnknownEvent, parse, parse_event

# A value of each type that a field may have.
VALUES: dict[Any, Any] = {
    int: 3,
    float: 1.5,
    str: "text",
    bool: True,
    int | None: 3,
    float | None: 1.5,
    str | None: "text",
    bool | None: True,
    list[int]: [1, 2],
    list[float]: [1.5, 2.5],
    list[str]: ["a"],
    dict[str, Any] | None: {"a": 1},
    Mapping[str, float]: {"tokens_per_s": 7.0},
}
BEFORE = Entry(5.0, 2, RunStarted())


def known() -> list[type[Event]]:
    modules = (events.__name__, checkpointing.agent.events.__name__)
    return [kind for kind in Event.known.values() if kind.__module__ in modules]


def example(kind: type[Event]) -> Event:
    """An event with a value in each field."""
    hints = get_type_hints(kind)
    return kind(**{field.name: VALUES[hints[field.name]] for field in dataclasses.fields(kind)})


@pytest.mark.parametrize("kind", known(), ids=lambda kind: kind.name)
def test_every_event_is_read_as_it_was_written(kind: type[Event]) -> None:
    entry = Entry(12.5, 3, example(kind))
    line = entry.to_dict()
    assert (line["event"], line["time"], line["attempt"]) == (kind.name, 12.5, 3)
    assert parse(line) == entry


@pytest.mark.parametrize("kind", known(), ids=lambda kind: kind.name)
def test_fields_of_a_newer_version_are_ignored(kind: type[Event]) -> None:
    if not issubclass(kind, checkpointing.agent.events.MeasuredEvent):
        line = {**example(kind).to_dict(), "of a newer version": "x"}
        assert parse_event(line.pop("event"), line) == example(kind)


@pytest.mark.parametrize(
    ("name", "details", "expected"),
    [
        ("resumed", {"step": 3, "from": "memory"}, Resumed(step=3, source="memory")),
        ("checkpoint_set_aside", {"step": 3, "kept_as": "x"}, CheckpointQuarantined(step=3, kept_as="x")),
    ],
)
def test_names_of_older_versions_are_read(name: str, details: dict[str, Any], expected: Event) -> None:
    assert parse_event(name, details) == expected


def test_an_unknown_event_is_kept_as_it_is() -> None:
    line = {"time": 7.0, "event": "of a newer version", "attempt": 2, "detail": [1, {"a": None}]}
    entry = parse(line)
    assert entry is not None and isinstance(entry.event, UnknownEvent)
    assert entry.to_dict() == line


@pytest.mark.parametrize(
    "line",
    [
        {"event": "progress", "attempt": 1, "step": 3},
        {"time": "7", "event": "progress", "attempt": 1, "step": 3},
        {"time": -1, "event": "progress", "attempt": 1, "step": 3},
        {"time": float("nan"), "event": "progress", "attempt": 1, "step": 3},
        {"time": 1e300, "event": "progress", "attempt": 1, "step": 3},
    ],
)
def test_a_line_without_a_time_has_that_of_the_line_before(line: dict[str, Any]) -> None:
    found = parse(line, BEFORE)
    assert found is not None and isinstance(found.event, Malformed) and (found.time, found.attempt) == (5.0, 2)
    assert parse(line) is None, "the first line has no time to be recorded under"


@pytest.mark.parametrize(
    ("line", "attempt"),
    [
        ({"time": 7.0, "event": "progress", "attempt": -1, "step": 3}, 2),
        ({"time": 7.0, "event": "progress", "attempt": "1", "step": 3}, 2),
        ({"time": 7.0, "event": 3, "attempt": 1}, 1),
        ({"time": 7.0, "attempt": 1}, 1),
        ({"time": 7.0, "event": "progress", "attempt": 1}, 1),
        ({"time": 7.0, "event": "progress", "attempt": 1, "step": "three"}, 1),
        ({"time": 7.0, "event": "backoff", "attempt": 1, "delay_s": float("inf")}, 1),
    ],
)
def test_a_damaged_event_is_counted_under_its_time(line: dict[str, Any], attempt: int) -> None:
    found = parse(line, BEFORE)
    assert found is not None and isinstance(found.event, Malformed)
    assert (found.time, found.attempt) == (7.0, attempt)


def test_metrics_are_the_finite_numbers_that_are_no_fields() -> None:
    details = {"step": 3, "loss": 2.0, "grad_norm": 1, "note": "x", "nan": float("nan"), "flag": True, "big": 10**400}
    assert parse_event("log", details) == Log(step=3, loss=2.0, metrics={"grad_norm": 1})


def test_a_metric_cannot_replace_a_field() -> None:
    assert Log(step=3, loss=2.0, metrics={"loss": 9.0, "event": 1.0}).to_dict() == {
        "event": "log",
        "step": 3,
        "loss": 2.0,
    }


def test_a_line_that_is_no_object() -> None:
    assert parse(None, None) is None
    found = parse(None, BEFORE)
    assert found is not None and (found.time, found.attempt) == (5.0, 2) and isinstance(found.event, Malformed)


def test_an_attempt_in_a_message_is_no_metric() -> None:
    event = parse_event("log", {"attempt": 1, "time": 5.0, "step": 2, "loss": 0.5, "tokens_per_s": 10.0})
    assert event == Log(step=2, loss=0.5, metrics={"tokens_per_s": 10.0})
    entry = Entry(7.0, 3, event)
    line = entry.to_dict()
    assert (line["time"], line["attempt"]) == (7.0, 3)
    assert parse(line) == entry
