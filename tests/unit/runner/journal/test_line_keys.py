"""A rank's message carries its attempt; as a metric it would replace the attempt of the journal's line."""

from __future__ import annotations

from checkpointing.agent.events import Log
from runner.journal.events import Entry
from runner.journal.parsing import parse, parse_event


def test_an_attempt_in_a_message_is_no_metric() -> None:
    event = parse_event("log", {"attempt": 1, "time": 5.0, "step": 2, "loss": 0.5, "tokens_per_s": 10.0})
    assert event == Log(step=2, loss=0.5, metrics={"tokens_per_s": 10.0})
    entry = Entry(7.0, 3, event)
    line = entry.to_dict()
    assert (line["time"], line["attempt"]) == (7.0, 3)
    assert parse(line) == entry
