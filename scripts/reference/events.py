"""The events of a journal, from the docstrings of their classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields

import griffe

from checkpointing.agent.events import Event
from runner.journal import events as journal_events
from scripts.reference.markdown import page, table, wrap
from scripts.reference.source import read_source

_FILES = {
    "checkpointing.agent.events": "Reported by ranks and the agent",
    journal_events.__name__: "Recorded by the runner",
}
# Fields of base classes, explained once.
_COMMON = {"run_step", "stage"}


def render() -> str:
    parts = [
        wrap(
            "`journal.jsonl` in the folder of a run has one JSON object per line. Every line has `time` (seconds "
            "since the epoch), `event` (a name below) and `attempt` (number of the newest attempt, 0 before the first "
            "one). Fields without a value are absent. In a script that trains several times, events of a later "
            "training also have `stage` (its name) and `run_step` (its `step` counted over all of them). Readers must "
            "ignore names and fields that they do not know. Older versions wrote `checkpoint_set_aside` for "
            "`checkpoint_quarantined`, `note_failed` for `restart_state_failed`, and the field `from` of `resumed` for "
            "`source`."
        )
    ]
    for module, title in _FILES.items():
        documented = read_source(module)
        parts.append(f"## {title}")
        for name, known in sorted(Event.known.items()):
            if known.__module__ == module:
                parts += [f"### {name}", *_event(documented[known.__name__], known)]
    return page("Events", "checkpointing/agent/events.py and runner/journal/events.py", parts)


def _event(documented: griffe.Object | griffe.Alias, known: type[Event]) -> Iterator[str]:
    docstring = documented.docstring
    assert docstring is not None, f"{known.__name__} needs a docstring"
    meanings = _inherited(documented, known)
    for section in docstring.parse("google"):
        if section.kind is griffe.DocstringSectionKind.text:
            yield wrap(section.value)
        elif section.kind is griffe.DocstringSectionKind.attributes:
            meanings |= _attributes(section)
    rows = [
        [f"`{own.name}`", _type(own), "yes" if _is_required(own) else "no", meanings.get(own.name, "")]
        for own in fields(known)
        if own.name not in _COMMON
    ]
    if rows:
        yield table(["field", "type", "required", "meaning"], rows)


def _is_required(own: Field[object]) -> bool:
    return own.default is MISSING and own.default_factory is MISSING


def _type(own: Field[object]) -> str:
    # Cells of a table must not contain "|"; a field that may be None is simply absent.
    return str(own.type).removesuffix(" | None")


def _inherited(documented: griffe.Object | griffe.Alias, known: type[Event]) -> dict[str, str]:
    """Collect the descriptions of the fields of base classes."""
    meanings: dict[str, str] = {}
    module = read_source("checkpointing.agent.events")
    for base in reversed(known.__mro__[1:]):
        docstring = module[base.__name__].docstring if base.__module__ == "checkpointing.agent.events" else None
        for section in docstring.parse("google") if docstring is not None else ():
            if section.kind is griffe.DocstringSectionKind.attributes:
                meanings |= _attributes(section)
    return meanings


def _attributes(section: griffe.DocstringSection) -> dict[str, str]:
    return {one.name: " ".join(one.description.split()) for one in section.value}
