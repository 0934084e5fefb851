"""Files of the working directory are not run in the place of this project's, or of its libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from checkpointing.host import interpreter
from checkpointing.host.interpreter import module_command


@pytest.mark.parametrize("name", ["checkpointing", "psutil", "xxhash", "runner"])
def test_a_file_in_the_working_directory_is_not_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')\nraise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    command = module_command("checkpointing.host.interpreter")
    assert subprocess.run(command).returncode == 0 and not (tmp_path / "was-run").exists()
    # As Python alone would do with the first of them.
    if name == "checkpointing":
        assert subprocess.run([sys.executable, *command[2:]], capture_output=True).returncode != 0


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert module_command("x") == [sys.executable, "-P", "-m", "x"]


def test_where_the_project_lies_in_the_working_directory_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(interpreter._ROOT)
    assert module_command("checkpointing.agent", "--x") == [sys.executable, "-m", "checkpointing.agent", "--x"]
