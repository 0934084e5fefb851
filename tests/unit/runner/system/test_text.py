"""Numbers with units; and what a terminal would obey is only shown."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from runner.cli.options import echo
from runner.journal.journal import JOURNAL_NAME, JournalReader
from runner.recovery.classify import RankEnd, classify
from runner.system.text import all_visible, choice_of, duration, gb, shortened, visible
from runner.ui.progress import ProgressDisplay

# Clears the screen, sets the title, reports the title as if it was typed, C1's short form, and turns a line around.
COMMANDS = ["\x1b[2J", "\x1b]0;owned\x07", "\x1b[21t", "\x9b2J", "\x08\x08", "\r", "\u202etxt", "\x7f"]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_spelled_out_wherever_a_text_comes_from(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"before {command} after"
    shown = visible(text)
    assert shown.isprintable() and shown.startswith("before ") and shown.endswith(" after")
    cause = classify(
        [RankEnd(0, 0, 1, f"RuntimeError: {text}", "t.py:1")], finished=False, started_step=0, step=0
    ).cause
    assert cause.isprintable()
    entry = {"time": 1.0, "attempt": 1, "event": "attempt_ended", "kind": "crashed", "cause": text}
    (tmp_path / JOURNAL_NAME).write_text(json.dumps(entry) + "\n")
    [read] = JournalReader(tmp_path / JOURNAL_NAME).entries()
    assert text not in str(read) and "after" in str(read)
    ProgressDisplay(live=False).message(text)
    printed = capsys.readouterr().out
    assert "after" in printed and printed.rstrip("\n").isprintable()
    assert command not in CliRunner().invoke(_echoing(text)).output


def _echoing(text: str) -> click.Command:
    return click.Command("x", callback=lambda: echo(text))


@given(st.text())
def test_what_can_be_printed_stays_as_it_is(text: str) -> None:
    kept = "".join(one for one in text if one.isprintable() or one in "\t\n")
    assert visible(kept) == kept and visible(visible(text)) == visible(text)


def test_all_texts_of_a_record() -> None:
    assert all_visible({"a\x1b": ["\x07", 1, None, {"b": "c\x00"}]}) == {"a\\x1b": ["\\x07", 1, None, {"b": "c\\x00"}]}


def test_numbers() -> None:
    assert (gb(24_180_000_000), gb(3_200_000)) == ("24.18 GB", "3.20 MB")
    found = [duration(seconds) for seconds in (9.5, 42, 119.7, 200, 18720, 187200)]
    assert found == ["9.5 s", "42 s", "2 min 0 s", "3 min 20 s", "5 h 12 min", "2 d 4 h"]


def test_a_long_text_of_others_is_shortened() -> None:
    assert shortened("short") == "short"
    assert shortened("a" * 50 + "b" * 50, 30) == "a" * 20 + "…" + "b" * 10


def test_of_many_names_those_alike_are_named() -> None:
    assert choice_of(["tp", "dp_shard"], "pp", "see") == "use one of tp, dp_shard"
    many = [f"option_{number:03}" for number in range(100)]
    assert choice_of(many, "optoin_042", "see the page").startswith("did you mean option_042")
    assert choice_of(many, "quite different", "see the page") == "see the page"
    assert choice_of([], "x", "see the page") == "see the page"
