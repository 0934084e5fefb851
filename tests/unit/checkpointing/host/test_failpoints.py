"""Faults at named places: armed by environment, or by a file while the process runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from checkpointing.host.failpoints import FAILPOINTS_ENV, FILE_ENV, ONCE_ENV

PROCESS = """
import sys
from checkpointing.host.failpoints import failpoint
for line in sys.stdin:
    try:
        failpoint(line.strip())
        print("past", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


class Process:
    """A process that passes a failpoint on request."""

    def __init__(self, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def pass_failpoint(self, name: str) -> str:
        """Return what the process prints; an empty string if it has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def end(self) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        return self._process.wait(120)


def arm(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    new.rename(file)


def test_the_nth_time_and_once_for_all_that_share_a_folder(tmp_path: Path) -> None:
    variables = {FAILPOINTS_ENV: "local.write=full@2", ONCE_ENV: str(tmp_path)}
    first, second = Process(**variables), Process(**variables)
    assert [first.pass_failpoint("local.write") for _ in range(3)] == [
        "past",
        "No space left on device (failpoint local.write)",
        "past",
    ]
    assert [second.pass_failpoint("local.write") for _ in range(3)] == ["past"] * 3
    assert (first.end(), second.end()) == (0, 0)


def test_of_several_numbers_each_fires_once(tmp_path: Path) -> None:
    """A process that is restarted counts from one again."""
    variables = {FAILPOINTS_ENV: "local.write=error@3,2", ONCE_ENV: str(tmp_path)}
    first, second = Process(**variables), Process(**variables)
    assert ["failpoint" in first.pass_failpoint("local.write") for _ in range(2)] == [False, True]
    assert ["failpoint" in second.pass_failpoint("local.write") for _ in range(4)] == [False, False, True, False]
    assert (first.end(), second.end()) == (0, 0)


def test_a_file_arms_processes_that_run(tmp_path: Path) -> None:
    file = tmp_path / "failpoints"
    process = Process(**{FILE_ENV: str(file)})
    assert process.pass_failpoint("local.write") == "past", "no file yet"
    arm(file, "local.write=error")
    assert process.pass_failpoint("local.written") == "past"
    assert process.pass_failpoint("local.write") == "Input/output error (failpoint local.write)"
    assert process.pass_failpoint("local.write") == "past"
    arm(file, "local.write=error")
    assert "failpoint" in process.pass_failpoint("local.write"), "it was armed again"
    arm(file, "")
    assert process.pass_failpoint("local.write") == "past"
    arm(file, "local.written=kill")
    assert process.pass_failpoint("local.written") == "" and process.end() == -signal.SIGKILL


def test_each_version_of_a_file_fires_once_for_all(tmp_path: Path) -> None:
    file, fired = tmp_path / "failpoints", tmp_path / "fired"
    fired.mkdir()
    variables = {FILE_ENV: str(file), ONCE_ENV: str(fired)}
    first, second = Process(**variables), Process(**variables)
    for number in (1, 2):
        arm(file, "local.write=error")
        assert "failpoint" in first.pass_failpoint("local.write")
        assert second.pass_failpoint("local.write") == "past"
        status = file.stat()
        assert (fired / f"local.write.{status.st_ino}.{status.st_mtime_ns}").exists()
        assert len(list(fired.iterdir())) == number
    assert (first.end(), second.end()) == (0, 0)
