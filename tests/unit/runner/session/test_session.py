"""What a runner does to its node on entry and takes back at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.journals import event
from helpers.node_fakes import FakeDisplay

from runner.config.schema import Config
from runner.journal.events import PreemptionNotice, Progress, SaveRequested, StopRequested
from runner.journal.journal import Journal, read_journal
from runner.journal.run_directory import RunDirectory
from runner.preemption.clouds import Notice
from runner.session import session
from runner.session.session import Session
from runner.system.event_loop import EventLoop, StopRequest


class System:
    """What a session asks of the system; nothing of it happens."""

    def __init__(self) -> None:
        self.strays = 0
        self.calls: list[str] = []

    def become_subreaper(self) -> None:
        self.calls.append("subreaper")

    def yield_to_others(self) -> None:
        self.calls.append("yield")

    def kill_all(self, find: Any) -> int:
        self.calls.append("kill")
        return self.strays

    def mark(self, run_id: str, node_rank: int) -> str:
        return f"{run_id}/{node_rank}"

    def remove_semaphores(self, mark: str) -> None:
        self.calls.append("semaphores")


class Watcher:
    """A watcher whose notices a test posts."""

    newest: Watcher

    def __init__(self, provider: str, endpoint: str | None, notify: Any, report: Any) -> None:
        self.provider, self.notify, self.report = provider, notify, report
        self.running = False
        Watcher.newest = self

    def start(self) -> None:
        self.running = True

    def close(self) -> None:
        self.running = False


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> System:
    system = System()
    monkeypatch.setattr(session, "processes", system)
    monkeypatch.setattr(session, "separate_oom_kills", lambda: system.calls.append("memory"))
    monkeypatch.setattr(session, "NoticeWatcher", Watcher)
    monkeypatch.setattr(EventLoop, "wake_by_signals", lambda loop: None)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(session, "short_temporary_folder", lambda: str(tmp_path / "temporary"))
    return system


def opened(folder: Path, **restart: Any) -> Session:
    display: Any = FakeDisplay()
    directory = RunDirectory(str(folder / "run"))
    directory.create()
    config = Config.model_validate({"output_dir": str(directory.root), "restart": restart})
    return Session(config, directory, display, StopRequest())


def texts(one: Session) -> list[str]:
    display: Any = one.display
    return list(display.texts)


def test_everything_is_taken_back_at_the_end(system: System, tmp_path: Path) -> None:
    with opened(tmp_path) as one:
        assert system.calls == ["subreaper", "yield", "memory", "kill", "semaphores"]
        assert one.runtime.is_dir() and not texts(one)
    assert not one.runtime.exists() and system.calls[-1] == "semaphores"


def test_what_an_earlier_session_left_is_removed(system: System, tmp_path: Path) -> None:
    system.strays = 3
    with opened(tmp_path) as one:
        left = one.runtime.with_name(one.runtime.name[: len("runner-12345678")] + "left")
    left.mkdir()
    another = one.runtime.with_name("runner-another")
    another.mkdir()
    with opened(tmp_path) as one:
        assert not left.exists() and another.exists()
    assert texts(one) == ["ended 3 processes that an earlier session of this run had left"]


def test_attempts_and_time_continue_those_of_the_journal(system: System, tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path / "run"))
    directory.create()
    journal = Journal(directory.journal, lambda: 9e9)
    journal.append(event("progress", step=3), 7)
    journal.close()
    one = opened(tmp_path)
    assert one.attempt == 7 and one.clock() >= 9e9
    with one:
        one.attempt = 8
        one.record(Progress(step=4))
    assert [entry.attempt for entry in read_journal(directory.journal)] == [7, 8]


def test_a_stop_request_is_announced_once(system: System, tmp_path: Path) -> None:
    with opened(tmp_path) as one:
        passed_on: list[str] = []
        one.announce_stop(passed_on.append)
        assert passed_on == []
        one.stop.ask("SIGTERM")
        one.announce_stop(passed_on.append)
        one.announce_stop(passed_on.append)
        assert passed_on == ["SIGTERM"]
        (entry,) = read_journal(one.directory.journal)
        assert entry.event == StopRequested(reason="SIGTERM")
        assert texts(one)[0].startswith("stop requested (SIGTERM): the ranks take a snapshot")


def test_a_stop_request_ends_a_wait(system: System, tmp_path: Path) -> None:
    with opened(tmp_path) as one:
        one.loop.call(lambda: one.stop.ask("SIGTERM"))
        one.sleep(3600.0)
        assert one.stop


def test_a_wait_ends_by_itself(system: System, tmp_path: Path) -> None:
    with opened(tmp_path) as one:
        one.sleep(0.01)


def test_a_notice_of_the_cloud_is_a_stop_request(system: System, tmp_path: Path) -> None:
    with opened(tmp_path, preemption_notices="aws") as one:
        assert Watcher.newest.running and Watcher.newest.provider == "aws"
        Watcher.newest.notify(Notice("aws", "rebalance recommendation", None, is_old=True))
        one.loop.pump(1.0)
        assert not one.stop and "posted before this runner started; continuing" in texts(one)[0]
        Watcher.newest.notify(Notice("aws", "terminate", 119.96))
        one.loop.pump(1.0)
        assert one.stop.reason == "aws: terminate"
        (entry,) = read_journal(one.directory.journal)
        assert entry.event == PreemptionNotice(source="aws", what="terminate", seconds_left=120.0)
    assert not Watcher.newest.running


def test_a_journal_that_could_not_be_written_is_pointed_out(
    system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Journal, "is_complete", False)
    with opened(tmp_path) as one:
        one._journal.error = "Disk quota exceeded"
    assert "journal.jsonl could not be written (Disk quota exceeded)" in capsys.readouterr().err


def test_a_folder_whose_path_is_too_long_for_sockets_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket's path has at most 107 bytes."""
    long, short = tmp_path / ("x" * 40), tmp_path.parents[1]
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    assert session.short_temporary_folder() == "/tmp"
    monkeypatch.setattr("tempfile.tempdir", str(short) if len(str(short)) <= 38 else "/var/tmp")
    assert session.short_temporary_folder() in (str(short), "/var/tmp")
    # There is no other one that can be written: the sockets' own error will say what is wrong.
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert session.short_temporary_folder() == str(long)


def test_a_request_for_a_checkpoint_is_passed_on_and_recorded(system: System, tmp_path: Path) -> None:
    with opened(tmp_path) as one:
        one.requests._saves += ["runner save", "SIGUSR2"]
        steps = [7, 9]
        for saves in (True, False, True):
            one.pass_on_save(lambda: steps.pop(0), saves=saves)
        found = [entry.event for entry in read_journal(one.directory.journal)]
        assert found == [
            SaveRequested(source="runner save", step=7),
            SaveRequested(source="SIGUSR2", step=9, saves=False),
        ]
        assert texts(one) == [
            "checkpoint requested (runner save): it is made at the next step",
            "checkpoint requested (SIGUSR2): but nothing of this program is saved so far",
        ]
