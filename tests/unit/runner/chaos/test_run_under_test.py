"""A run as it is seen from outside: its environment, its journal, and how long it is waited for."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.journals import event

from checkpointing.agent.events import Log
from checkpointing.host.environment import REHEARSAL_ENV
from runner.chaos import run_under_test as module
from runner.chaos.run_under_test import MARK_ENV, JobUnderTest, RunUnderTest, runner_command
from runner.journal.events import RankStarted
from runner.journal.journal import JOURNAL_NAME, Journal


class Process:
    """A supervisor that runs until the test says so."""

    pid = 2**22 + 1

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments, self.options = arguments, options
        self.code: int | None = None
        self.on_poll: Callable[[], None] = lambda: None

    def poll(self) -> int | None:
        self.on_poll()
        return self.code

    def wait(self, timeout: float = 0.0) -> int | None:
        return self.code


class Subject(RunUnderTest):
    """A run whose processes exist only in the test."""

    process: Any

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(["runner", "start"], folder, **options)
        self.process = Process()
        self._written = Journal(folder / JOURNAL_NAME, time.time)

    def log(self, step: int, attempt: int = 1) -> None:
        self._written.append(event("log", step=step, loss=1.0), attempt)

    def alive(self) -> list[Any]:
        return []


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.setattr(module, "POLL_S", 0.0)
    return Subject(tmp_path)


def test_the_users_own_settings_do_not_change_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPOCHS", "9")
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setattr("runner.chaos.run_under_test.subprocess.Popen", Process)
    pids: list[int] = []
    run = Subject(tmp_path, environment={"HF_HOME": "/other"}, on_start=pids.append)
    run.start()
    environment = run.process.options["env"]
    assert "EPOCHS" not in environment and environment["HF_HOME"] == "/other"
    assert environment["TMPDIR"] == str(tmp_path / "tmp") and (tmp_path / "tmp").is_dir()
    assert len(environment[MARK_ENV]) == 32 and run.process.options["start_new_session"]
    assert pids == [Process.pid]


def test_two_runs_are_marked_differently(tmp_path: Path) -> None:
    marks = [Subject(tmp_path)._environment[MARK_ENV] for _ in range(2)]
    assert marks[0] != marks[1]


def test_events_of_a_kind_and_of_later_attempts(run: Subject) -> None:
    for step, attempt in ((1, 1), (2, 1), (2, 2)):
        run.log(step, attempt)
    assert run.all(Log) == []
    run.refresh()
    assert [one.step for one in run.all(Log)] == [1, 2, 2]
    assert [one.step for one in run.all(Log, after=1)] == [2] and run.all(RankStarted) == []


def test_a_wait_ends_with_what_was_found(run: Subject) -> None:
    looks = iter([None, None, "found"])
    assert run.wait(lambda: next(looks), 60) == "found"


def test_what_is_written_just_before_the_end_is_found(run: Subject) -> None:
    def end() -> None:
        if run.process.code is None:
            run.log(3)
            run.process.code = 0

    run.process.on_poll = end
    # The process had ended when it was asked, so the journal is complete when it is read.
    assert run.wait(lambda: run.all(Log) or None, 60) == [event("log", step=3, loss=1.0)]


def test_a_wait_ends_with_the_run_or_the_time(run: Subject) -> None:
    assert run.wait(lambda: None, 0.0) is None
    limits = iter([1e9, 1e9, -1.0])
    assert run.wait(lambda: None, lambda: next(limits)) is None
    run.process.code = 1
    assert run.wait(lambda: None, 1e9) is None


def test_the_newest_process_of_a_rank_is_the_rank(run: Subject) -> None:
    for pid in (2**22 + 5, os.getpid()):
        run._written.append(event("rank_started", rank=1, local_rank=1, pid=pid), 1)
    run._written.append(event("rank_started", rank=0, local_rank=0, pid=2**22 + 5), 1)
    run.refresh()
    found = run.rank(1)
    assert found is not None and found.pid == os.getpid()
    assert run.rank(0) is None and run.rank(2) is None
    assert run.helper("runner.launcher.launcher") is None


def test_what_is_left_is_described_after_a_while(run: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    reaped: list[set[int]] = []
    monkeypatch.setattr("runner.chaos.run_under_test.processes.reap_strays", reaped.append)
    assert run.leftovers() == []
    monkeypatch.setattr(run, "alive", lambda: [psutil.Process()])
    [text] = run.leftovers(0.0)
    assert text.startswith(f"{os.getpid()} ") and reaped == [{Process.pid}, {Process.pid}]


def test_the_command_is_the_one_of_this_environment() -> None:
    job = JobUnderTest(["--debug"], ["-m", "own.job", "--x"]).with_settings("a=1", "b=2").with_options("--cold")
    expected = ["start", "--output-dir", "/run", "--debug", "--set", "a=1", "--set", "b=2", "--cold", "--last"]
    assert job.command(Path("/run"), "--last")[1:] == [*expected, "-m", "own.job", "--x"]
    assert job.environment(Path("/run")) == {}
    short = replace(job, length=(20, 4)).environment(Path("/run"))
    assert short == {REHEARSAL_ENV: "20:4:/run/program-output"}
    command = runner_command(Path("/run"), "--debug", script=["train.py", "--x"])
    assert command[0] == str(Path(sys.executable).with_name("runner"))
    assert command[1:] == ["start", "--output-dir", "/run", "--debug", "train.py", "--x"]


def test_what_a_killed_runner_leaves_goes_with_the_run(tmp_path: Path) -> None:
    run = Subject(tmp_path)
    sockets = Path(run._environment["XDG_RUNTIME_DIR"])
    assert len(str(sockets)) <= 38
    (sockets / "runner-x").mkdir()
    run.close()
    assert not sockets.exists()
