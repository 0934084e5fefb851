"""Stacks of hung processes, with a command in the place of py-spy."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from runner.ranks import stacks


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command that is run in the place of py-spy."""
    command = ["echo", "in step at train.py:7"]
    monkeypatch.setattr(stacks, "_command", lambda pid: list(command))
    return command


def pump() -> None:
    time.sleep(0.005)


def test_each_process_has_a_file_with_the_kernels_view_and_its_stacks(tmp_path: Path, spy: list[str]) -> None:
    folder = tmp_path / "logs" / "attempt-1"
    files = stacks.dump_stacks({"rank0": os.getpid(), "rank1": 2**22}, folder, pump)
    assert files == [folder / "stacks-rank0.txt", folder / "stacks-rank1.txt"]
    text = files[0].read_text()
    assert text.startswith(f"process {os.getpid()}, state ") and f"thread {os.getpid()}: " in text
    assert text.endswith("in step at train.py:7\n")
    assert "state ?" in files[1].read_text(), "of no process"


def test_a_spy_that_hangs_is_ended(tmp_path: Path, spy: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    spy[:] = ["sleep", "100"]
    monkeypatch.setattr(stacks, "_TIMEOUT_S", 0.02)
    pumped: list[None] = []

    def counted() -> None:
        pumped.append(None)
        pump()

    (file,) = stacks.dump_stacks({"rank0": os.getpid()}, tmp_path, counted)
    assert "py-spy was ended after 0 s" in file.read_text() and pumped


def test_nothing_is_raised_where_there_is_no_spy_and_no_folder(tmp_path: Path, spy: list[str]) -> None:
    spy[:] = ["/nonexistent/py-spy"]
    assert len(stacks.dump_stacks({"rank0": os.getpid()}, tmp_path, pump)) == 1
    (tmp_path / "file").touch()
    assert stacks.dump_stacks({"rank0": os.getpid()}, tmp_path / "file", pump) == []


@pytest.mark.parametrize(("state", "option"), [("S", "--native"), ("R", "--native"), ("T", "--nonblocking")])
def test_a_stopped_process_is_only_read(state: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """py-spy would wait without end for a process that does not run."""
    monkeypatch.setattr("runner.system.processes.state", lambda pid: state)
    command = stacks._command(7)
    assert option in command and command[-2:] == ["--pid", "7"]
