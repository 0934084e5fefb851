"""What hangs in an attempt: a rank that the watchdog finds, or a process that was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.node_fakes import FakeDisplay, FakeHelper, FakeHost, FakeRanks, beat

from checkpointing.agent.events import Event
from checkpointing.host.heartbeat import Phase
from runner.journal.events import HangFound
from runner.node.hang_check import HangCheck
from runner.ranks.watchdog import HangLimits, Watchdog
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
            Watchdog(HangLimits(20.0, 20.0, 60.0), watch_start=True, now=self.host.now),
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
    bench.check._watchdog.patience_used_up = True
    factors = []
    for _ in range(8):
        factors.append(bench.check.next_patience)
        bench.check.be_patient(factors[-1])
    assert factors == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 64.0, 64.0]
    bench.check._watchdog.patience_used_up = False
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
    assert not bench.check.busy
    bench.beats[1] = beat(Phase.SAVING, 7, beats=8)
    bench.look(1)
    assert bench.check.busy
