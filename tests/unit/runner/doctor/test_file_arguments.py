"""What the doctor makes of the paths among a program's arguments."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.doctor.file_arguments import check_arguments, kept_checkpoints
from runner.doctor.findings import Level
from runner.program.program import Program


def check(*arguments: str) -> list[tuple[Level, str]]:
    return [(one.level, one.text) for one in check_arguments(Program("script", "train.py", arguments))]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "level"),
    [
        ("a.yaml", "a: 1", Level.OK),
        ("a.yaml", "a: [1", Level.FAIL),
        ("a.yml", "a: !of_the_program {b: 1}", Level.OK),
        ("a.yml", "a: 1\n---\nb: 2", Level.OK),
        ("a.json", '{"a": 1}', Level.OK),
        ("a.json", '{\n "a": 1\n}', Level.OK),
        ("a.json", '{"a": 1', Level.FAIL),
        ("a.json", '{\n"a": 1,\n', Level.FAIL),
        # Data with one value a line.
        ("a.json", '{"a": 1}\n{"a": 2}\n', Level.OK),
        ("a.json", '{"a": 1}\n{"a": ', Level.FAIL),
        ("a.json", "", Level.FAIL),
        ("a.toml", "a = 1", Level.OK),
        ("a.toml", "a = ", Level.FAIL),
        ("a.txt", "a: [1", Level.OK),
    ],
)
@pytest.mark.parametrize("option", [(), ("--config",)])
def test_a_file_of_settings_must_parse(
    option: tuple[str, ...], name: str, text: str, level: Level, folder: Path
) -> None:
    (folder / name).write_text(text)
    [(found, said)] = check(*option, name)
    assert found is level
    if level is Level.FAIL:
        assert said.startswith(" ".join([*option, name]) + ": is not ") and len(said) < 300


def test_a_file_of_settings_that_is_not_text(folder: Path) -> None:
    (folder / "a.yaml").write_bytes(b"\xff\xfe")
    assert check("a.yaml")[0][0] is Level.FAIL


def test_a_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a.yaml").write_text("a: 1")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert check("--config", "a.yaml") == [(Level.FAIL, "--config a.yaml: cannot be read: Permission denied")]


@pytest.mark.parametrize("path", ["/nowhere/data", "./nowhere", "~/no/where", "a/b/c", "nowhere.jsonl", "no.yaml"])
def test_a_path_that_does_not_exist_is_a_warning(path: str) -> None:
    [(level, text)] = check("--data", path)
    assert level is Level.WARN and text.startswith(f"--data {path}: does not exist in ")


@pytest.mark.parametrize("value", ["org/name", "3", "1e-4", "s3://bucket/x.yaml", "text", "", "a\n/b/c"])
def test_what_is_not_a_path(value: str) -> None:
    assert check("--value", value) == []


def test_what_the_program_makes_need_not_exist(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ("--output_dir", "./out/a", "--log-file", "logs/a/b.txt")
    assert [level for level, _ in check(*made)] == [Level.OK]
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    found = check(*made)
    assert [level for level, _ in found] == [Level.WARN] * 2 and "--output_dir ./out/a: cannot be written" in found[0]


def test_nothing_is_said_of_arguments_without_paths() -> None:
    assert check("--lr", "3", "--flag") == []


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ((), None),
        (("--save_total_limit", "2"), 2),
        (("--save-total-limit=4", "--keep-last", "5"), 5),
        (("--keep_last", "none"), None),
        (("--keep_last", "0"), None),
    ],
)
def test_how_many_checkpoints_are_kept(arguments: tuple[str, ...], kept: int | None) -> None:
    assert kept_checkpoints(Program("script", "train.py", arguments)) == kept
