"""Errors in a file of training data name the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset

from runner.config.schema import DataConfig
from runner.training.rank import is_transient
from runner.training.training_data import load_training_data

GOOD = {"prompt": "a", "completion": "b"}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def load(folder: Path, text: str, name: str = "rows.jsonl", **options: Any) -> tuple[Any, Any]:
    path = folder / name
    path.write_text(text)
    return load_training_data(DataConfig(path=str(path), **options), folder / "cache", seed=3)


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("text", "name", "problem"),
    [
        (
            lines({"question": "a", "answer": "b"}),
            "rows.jsonl",
            r"has the columns answer, question; needed: prompt and",
        ),
        ("", "rows.jsonl", r"rows\.jsonl' (has no rows|cannot be read)"),
        (
            lines(GOOD, GOOD, {"prompt": "a", "completion": None}),
            "rows.jsonl",
            r"rows\.jsonl', row 3: completion is None",
        ),
        (lines(GOOD, {"prompt": "a", "completion": "  "}), "rows.jsonl", r"row 2: completion is '  '; fill it"),
        (lines(GOOD, GOOD) + '{"prompt": "a", \n', "rows.jsonl", r"rows\.jsonl' cannot be read, line 3: "),
        (lines(GOOD) + "[1]\n" + lines(GOOD), "rows.jsonl", r"rows\.jsonl' cannot be read, line 2: "),
        (lines(CHAT, {"messages": []}), "rows.jsonl", r"row 2: messages is \[\]"),
        (
            lines(CHAT, CHAT, {"messages": [CHAT["messages"][0], {"role": "assistant", "content": None}]}),
            "rows.jsonl",
            r"row 3: messages is .*'content': None",
        ),
        (lines({"messages": [{"from": "user", "value": "a"}]}), "rows.jsonl", r"row 1: messages is .*'from'"),
        ("prompt,completion\na,b\nc,\n", "rows.csv", r"row 2: completion is None"),
        ("no parquet", "rows.parquet", r"rows\.parquet' cannot be read: ArrowInvalid"),
        (lines({"text": "a"}, {"text": ""}), "rows.jsonl", r"row 2: text is ''"),
        (lines(CHAT, {"messages": [{"role": "assistant"}]}), "rows.jsonl", r"row 2: messages is "),
        ("prompt,completion\na,1\nb,2\n", "rows.csv", r"completion contains int64; needed: text"),
    ],
)
def test_a_bad_row_is_named(text: str, name: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        load(tmp_path, text, name)


def test_every_kind_of_file_is_read(tmp_path: Path) -> None:
    Dataset.from_list([GOOD] * 3).to_parquet(str(tmp_path / "rows.parquet"))
    rows, none = load_training_data(DataConfig(path=str(tmp_path / "rows.parquet")), tmp_path, seed=0)
    assert len(rows) == 3 and none is None
    assert load(tmp_path, lines(CHAT, CHAT))[0].column_names == ["messages"]
    assert load(tmp_path, json.dumps([GOOD, GOOD]), "rows.json")[0].num_rows == 2
    assert load(tmp_path, "text\nhello\n", "rows.csv")[0][0] == {"text": "hello"}


def test_rows_that_look_empty_and_are_not(tmp_path: Path) -> None:
    assert load(tmp_path, "prompt,completion\na,None\nb,NA\n", "rows.csv")[0]["completion"][:] == ["None", "NA"]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]}
    assert load(tmp_path, lines({"messages": [{**CHAT["messages"][0], "tool_calls": None}, call]}))[0].num_rows == 1


def test_a_share_is_held_back_for_evaluations(tmp_path: Path) -> None:
    rows = [{"text": f"row {number}"} for number in range(20)]
    train, held = load(tmp_path, lines(*rows), validation_share=0.25)
    again, _ = load(tmp_path, lines(*rows), validation_share=0.25)
    assert (len(train), len(held)) == (15, 5) and train["text"][:] == again["text"][:]
    assert {*train["text"], *held["text"]} == {row["text"] for row in rows}
    with pytest.raises(ValueError, match=r"validation_share=0.01 of 20 rows is less than one row"):
        load(tmp_path, lines(*rows), validation_share=0.01)


def test_another_file_is_for_evaluations(tmp_path: Path) -> None:
    other = tmp_path / "held.jsonl"
    other.write_text(lines(GOOD))
    assert len(load(tmp_path, lines(GOOD, GOOD), validation_path=str(other))[1]) == 1
    other.write_text(lines(GOOD, {"prompt": "", "completion": "b"}))
    with pytest.raises(ValueError, match=r"data\.validation_path='.*held\.jsonl', row 2: prompt is ''"):
        load(tmp_path, lines(GOOD, GOOD), validation_path=str(other))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_server_that_is_away_is_seen_as_that(
    streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cause was cut off, so that it looked like a file that cannot be read at any time."""

    def away(*_: Any, **__: Any) -> Any:
        raise datasets.exceptions.DatasetGenerationError("it went wrong") from ConnectionError("503")

    monkeypatch.setattr(datasets, "load_dataset", away)
    (tmp_path / "rows.jsonl").write_text("{}")
    config = DataConfig(path=str(tmp_path / "rows.jsonl"), streaming=streaming)
    with pytest.raises(ValueError, match=r"cannot be read.*: ConnectionError: 503") as caught:
        load_training_data(config, tmp_path / "cache", seed=1)
    assert is_transient(caught.value)
