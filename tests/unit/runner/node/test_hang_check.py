"""What hangs in an attempt: a rank that the watchdog finds, a process that was stopped, a silent launcher; stacks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.node_fakes import FakeDisplay, FakeHelper, FakeHost, FakeRanks, beat

from checkpointing.agent.events import Event
from checkpointing.host.heartbeat import Phase
from runner.config.schema import RestartConfig
from runner.journal.events import HangFound
from runner.node import hang_check
from runner.node.hang_check import HangCheck, LauncherCheck, Overdue, dump_stacks
from runner.ranks.watchdog import Watchdog
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind


class Helpers:
    def __init__(self) -> None:
        self.agent, self.launcher = FakeHelper(1), FakeHelper(2)


class Bench:
    """Two ranks whose global ranks are 4 and 5."""

    def __init__(self) -> None:
        self.host, self.display, self.ranks, self.helpers = FakeHost(), FakeDisplay(), FakeRanks(), Helpers()
        self.recorded: list[Event] = []
        self.ranks.start(4, 5)
        self.ranks.local_ranks = {4: 0, 5: 1}
        display: Any = self.display
        helpers: Any = self.helpers
        self.check = HangCheck(
            Watchdog(
                RestartConfig(hang_timeout_s=20.0, first_step_timeout_s=20.0, quiet_timeout_s=60.0),
                watch_start=True,
                now=self.host.now,
            ),
            ranks=self.ranks,
            helpers=helpers,
            display=display,
            record=self.recorded.append,
            host=self.host,
            write_stacks=lambda: [Path("/logs/attempt-1/stacks-rank4.txt")],
        )
        self.beats = [beat(Phase.TRAINING, 7, beats=7), beat(Phase.TRAINING, 7, beats=7)]

    def look(self, seconds: float, *, others_busy: bool = False, ending: bool = False) -> Failure | None:
        """Look once a second; the first rank makes progress."""
        found = None
        for _ in range(int(seconds)):
            self.host.now += 1.0
            self.beats[0] = self.beats[0]._replace(beats=self.beats[0].beats + 1)
            found = found or self.check.look(self.beats, self.host.now, others_busy=others_busy, ending=ending)
        return found


def test_a_silent_rank_hangs_and_its_stacks_are_named() -> None:
    bench = Bench()
    assert bench.look(19) is None
    failure = bench.look(3)
    assert failure is not None and (failure.kind, failure.rank) == (FailureKind.HUNG, 5)
    assert failure.cause.startswith("rank 5 hung: no heartbeat for")
    assert failure.cause.endswith("stacks: /logs/attempt-1/stacks-*.txt")
    (event,) = bench.recorded[:1]
    assert isinstance(event, HangFound) and event.ranks == [5] and len(event.stacks) == 1
    assert "writing the stacks of all ranks" in bench.display.texts[0]


def test_attempts_that_hang_in_a_row_are_given_twice_as_long_each_time() -> None:
    bench = Bench()
    bench.check.watchdog.patience_used_up = True
    factors = []
    for _ in range(8):
        factors.append(bench.check.next_patience)
        bench.check.watchdog.patience = factors[-1]
    assert factors == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 64.0, 64.0]
    bench.check.watchdog.patience_used_up = False
    assert bench.check.next_patience == 1.0


def test_nothing_hangs_while_another_node_is_busy_or_the_launcher_has_reported() -> None:
    assert Bench().look(60, others_busy=True) is None
    bench = Bench()
    assert bench.look(60, ending=True) is None and not bench.recorded


def test_a_stopped_rank_hangs_long_before_its_deadline() -> None:
    bench = Bench()
    bench.host.states[104] = "T"
    failure = bench.look(6)
    assert failure is not None and failure.rank == 4 and "was stopped (SIGSTOP)" in failure.cause


def test_a_stopped_helper_is_killed_and_no_rank_hangs() -> None:
    for pid, kind, name in ((1, FailureKind.AGENT_LOST, "agent"), (2, FailureKind.LAUNCHER_LOST, "launcher")):
        bench = Bench()
        # Ranks that wait for it are stopped by nobody, but silent.
        bench.host.states[pid] = "T"
        failure = bench.look(6)
        assert (
            failure is not None
            and failure.kind is kind
            and f"{name} was stopped (SIGSTOP to pid {pid})" in failure.cause
        )
        assert [bench.helpers.agent.alive, bench.helpers.launcher.alive] == [pid != 1, pid != 2]
        assert not bench.recorded


def test_a_rank_that_saves_makes_its_node_busy() -> None:
    bench = Bench()
    bench.look(1)
    assert not bench.check.watchdog.busy
    bench.beats[1] = beat(Phase.SAVING, 7, beats=8)
    bench.look(1)
    assert bench.check.watchdog.busy


class SilentLauncher:
    """Two ranks, and a launcher that stays silent."""

    def __init__(self) -> None:
        self.ranks = FakeRanks()
        self.check = LauncherCheck(self.ranks, 2, 100.0, 1000.0)

    def overdue_after(self, seconds: int, *, killed: bool = False) -> Overdue | None:
        """Look every second."""
        found = None
        for second in range(seconds + 1):
            found = found or self.check.look(1000.0 + second, killed=killed)
        return found


def test_a_launcher_that_starts_no_rank() -> None:
    assert SilentLauncher().overdue_after(100) is None
    overdue = SilentLauncher().overdue_after(101)
    assert overdue is not None and "no rank was started within 100 s" in overdue.cause
    assert (overdue.finished, overdue.over) == (False, False)


def test_running_ranks_need_no_report() -> None:
    bench = SilentLauncher()
    bench.ranks.start(0, 1)
    assert bench.overdue_after(1000) is None


@pytest.mark.parametrize(("done", "finished"), [({0, 1}, True), ({0}, False)])
def test_ranks_that_are_gone(done: set[int], finished: bool) -> None:
    bench = SilentLauncher()
    bench.ranks.start(0, 1)
    bench.ranks.kill()
    bench.ranks.done |= done
    assert bench.overdue_after(60) is None
    overdue = bench.overdue_after(61)
    assert overdue is not None and (overdue.finished, overdue.over) == (finished, True)


def test_ranks_that_this_runner_has_killed_are_reported_soon() -> None:
    bench = SilentLauncher()
    bench.ranks.start(0)
    bench.ranks.kill()
    overdue = bench.overdue_after(6, killed=True)
    assert overdue is not None and overdue.over and "did not end with its ranks" in overdue.cause


def test_a_rank_that_has_not_started_yet_is_waited_for() -> None:
    bench = SilentLauncher()
    bench.ranks.start(0)
    bench.ranks.kill()
    assert bench.overdue_after(200) is None


def test_the_time_for_which_this_process_was_stopped_does_not_count() -> None:
    bench = SilentLauncher()
    bench.check.skip(500.0)
    assert bench.check.look(1599.0, killed=False) is None
    assert bench.check.look(1601.0, killed=False) is not None


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command that is run in the place of py-spy."""
    command = ["echo", "in step at train.py:7"]
    monkeypatch.setattr(hang_check, "_command", lambda pid: list(command))
    return command


def pump() -> None:
    time.sleep(0.005)


def test_each_process_has_a_file_with_the_kernels_view_and_its_stacks(tmp_path: Path, spy: list[str]) -> None:
    folder = tmp_path / "logs" / "attempt-1"
    files = dump_stacks({"rank0": os.getpid(), "rank1": 2**22}, folder, pump)
    assert files == [folder / "stacks-rank0.txt", folder / "stacks-rank1.txt"]
    text = files[0].read_text()
    assert text.startswith(f"process {os.getpid()}, state ") and f"thread {os.getpid()}: " in text
    assert text.endswith("in step at train.py:7\n")
    assert "state ?" in files[1].read_text(), "of no process"


def test_a_spy_that_hangs_is_ended(tmp_path: Path, spy: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    spy[:] = ["sleep", "100"]
    monkeypatch.setattr(hang_check, "_SPY_TIMEOUT_S", 0.02)
    pumped: list[None] = []

    def counted() -> None:
        pumped.append(None)
        pump()

    (file,) = dump_stacks({"rank0": os.getpid()}, tmp_path, counted)
    assert "py-spy was ended after 0 s" in file.read_text() and pumped


def test_nothing_is_raised_where_there_is_no_spy_and_no_folder(tmp_path: Path, spy: list[str]) -> None:
    spy[:] = ["/nonexistent/py-spy"]
    assert len(dump_stacks({"rank0": os.getpid()}, tmp_path, pump)) == 1
    (tmp_path / "file").touch()
    assert dump_stacks({"rank0": os.getpid()}, tmp_path / "file", pump) == []


@pytest.mark.parametrize(("state", "option"), [("S", "--native"), ("R", "--native"), ("T", "--nonblocking")])
def test_a_stopped_process_is_only_read(state: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """py-spy would wait without end for a process that does not run."""
    monkeypatch.setattr("runner.system.processes.state", lambda pid: state)
    command = hang_check._command(7)
    assert option in command and command[-2:] == ["--pid", "7"]
