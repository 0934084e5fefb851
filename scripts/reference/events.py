"""The events of a journal, from the docstrings of their classes: a list item for each, with its fields."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields

import griffe

from checkpointing.agent.events import Event
from runner.journal import events as journal_events
from scripts.reference.markdown import item, page, wrap
from scripts.reference.source import read_source

_FILES = {
    "checkpointing.agent.events": "Reported by ranks and the agent",
    journal_events.__name__: "Recorded by the runner",
}
# Fields of base classes, explained once.
_COMMON = {"run_step", "stage", "step"}


def render() -> str:
    parts = [
        wrap(
            "`journal.jsonl` in the folder of a run has one JSON object per line. Every line has `time` (seconds "
            "since the epoch), `event` (a name below) and `attempt` (number of the newest attempt, 0 before the first "
            "one). Fields without a value are absent. `step` is an optimizer step, counted within its stage, unless "
            "the event says otherwise. In a script that trains several times, events of a later training also have "
            "`stage` (its name) and `run_step` (its `step` counted over all of them). Readers must ignore names and "
            "fields that they do not know. Older versions wrote `checkpoint_set_aside` for `checkpoint_quarantined`, "
            "`note_failed` for `restart_state_failed`, and the field `from` of `resumed` for `source`."
        )
    ]
    for module, title in _FILES.items():
        documented = read_source(module)
        parts.append(f"## {title}")
        found = [(name, known) for name, known in sorted(Event.known.items()) if known.__module__ == module]
        parts.append("\n".join(_event(name, documented[known.__name__], known) for name, known in found))
    return page("Events", "checkpointing/agent/events.py and runner/journal/events.py", parts)


def _event(name: str, documented: griffe.Object | griffe.Alias, known: type[Event]) -> str:
    docstring = documented.docstring
    assert docstring is not None, f"{known.__name__} needs a docstring"
    text, own_meanings = "", dict[str, str]()
    for section in docstring.parse("google"):
        if section.kind is griffe.DocstringSectionKind.text:
            text = section.value
        elif section.kind is griffe.DocstringSectionKind.attributes:
            own_meanings = _attributes(section)
    meanings = _inherited(known) | own_meanings
    with_step = (
        ", with `step`" if any(own.name == "step" for own in fields(known)) and "step" not in own_meanings else ""
    )
    lines = [item(f"`{name}`{with_step}: {text}")]
    for own in fields(known):
        if own.name not in _COMMON or own.name in own_meanings:
            optional = "" if _is_required(own) else ", optional"
            meaning = f": {meanings[own.name]}" if own.name in meanings else ""
            lines.append(item(f"`{own.name}` ({_type(own)}{optional}){meaning}", level=1))
    return "\n".join(lines).replace("``", "`")


def _is_required(own: Field[object]) -> bool:
    return own.default is MISSING and own.default_factory is MISSING


def _type(own: Field[object]) -> str:
    # A field that may be None is simply absent.
    return str(own.type).removesuffix(" | None")


def _inherited(known: type[Event]) -> dict[str, str]:
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
