"""What is read from the files that ended ranks leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.recovery.evidence import read_error_file, read_last_words

THROWN = "terminate called after throwing an instance of '{name}'\n  what():  {text}\n"


def test_error_files(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert read_error_file(path) is None
    for damaged in ("", "[]", "{}", '{"message": 3}', '{"message": {"message": "x"}}'):
        path.write_text(damaged)
        assert read_error_file(path) is None
    callstack = 'Traceback\n  File "/a/b.py", line 3, in f\n  File "/c.py", line 44, in g\nValueError: x\n'
    path.write_text(
        json.dumps(
            {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": callstack, "timestamp": "12"}}}
        )
    )
    assert read_error_file(path) == ("ValueError: x", "/c.py:44", 12.0)


def test_a_text_that_is_no_utf8_is_escaped(tmp_path: Path) -> None:
    """Such as the name of a file, from `os.listdir`. The restart state with it could not be read back, and another
    node took the message for damaged and its sender for lost.
    """
    path, name = tmp_path / "error.json", "caf\udce9.json"
    callstack = f'  File "/{name}", line 3, in f\n'
    extra = {"py_callstack": callstack, "timestamp": "12"}
    path.write_text(json.dumps({"message": {"message": f"RuntimeError: {name}", "extraInfo": extra}}))
    found = read_error_file(path)
    assert found == ("RuntimeError: caf\\udce9.json", "/caf\\udce9.json:3", 12.0)
    path.write_text(json.dumps({"message": name}))
    assert read_error_file(path) == ("caf\\udce9.json", None, None)


def test_an_error_file_without_a_traceback_has_its_text_alone(tmp_path: Path) -> None:
    """torchrun writes it for a rank that has left none itself."""
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": "SignalException: killed"}))
    assert read_error_file(path) == ("SignalException: killed", None, None)
    extra = {"py_callstack": "no frames", "timestamp": "12"}
    path.write_text(json.dumps({"message": {"message": "E", "extraInfo": extra}}))
    assert read_error_file(path) == ("E", None, 12.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (THROWN.format(name="A", text="one") + THROWN.format(name="B", text="two"), "B: two"),
        ("Fatal Python error: Aborted\n" + THROWN.format(name="A", text="one"), "A: one"),
        ("Fatal Python error: Bus error\nmore\n", "Fatal Python error: Bus error"),
        ("said: Fatal Python error: not at the begin of a line\n", None),
        (THROWN.format(name="A", text="x" * 1000), "A: " + "x" * 297),
        ("", None),
    ],
)
def test_last_words(tmp_path: Path, text: str, words: str | None) -> None:
    log = tmp_path / "stderr.log"
    log.write_text(text)
    assert read_last_words(log) == words


def test_only_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    """A rank that prints for days leaves gigabytes."""
    log = tmp_path / "stderr.log"
    log.write_bytes(THROWN.format(name="A", text="one").encode() + b"\xff" * 300_000)
    assert read_last_words(log) is None


FRAMES = (
    '  File "/torch/worker.py", line 374, in _worker_loop\n    data = fetch(index)\n           ^^^^^\n'
    '  File "/job/train.py", line 14, in collate\n    raise ValueError("row is broken: 137")\n'
)


@pytest.mark.parametrize(
    ("name", "traceback", "error"),
    [
        ("ValueError", "ValueError: broken: 137\nin two lines\n", "ValueError: broken: 137\nin two lines"),
        ("AssertionError", "AssertionError\n", "AssertionError:"),
        ("ParserError", 'yaml.ParserError: bad\n  File "a", line 3\n\n', 'yaml.ParserError: bad\n  File "a", line 3'),
        ("RecursionError", "  [Previous line repeated 9 more times]\nRecursionError: deep\n", "RecursionError: deep"),
    ],
)  # fmt: skip
def test_the_error_of_a_data_loaders_worker_is_its_own(name: str, traceback: str, error: str, tmp_path: Path) -> None:
    """The last line of the console is cut long before the end of its traceback."""
    message = (
        f"{name}: Caught {name} in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n{FRAMES}"
    )
    extra = {"py_callstack": '  File "/torch/dataloader.py", line 1, in next', "timestamp": "7"}
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": message + traceback, "extraInfo": extra}}))
    assert read_error_file(path) == (f"{error} (in DataLoader worker process 0)", "/job/train.py:14", 7.0)
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    assert read_error_file(path) == (message, "/torch/dataloader.py:1", 7.0), "cut"
