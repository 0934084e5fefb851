"""What each message of a rank changes, and that its messages come before its death."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.node_fakes import FakeHost, FakeLoop

from checkpointing.agent.events import Event
from runner.journal.events import BestModel, RankStarted
from runner.node.rank_reports import RankReports
from runner.ranks.messages import BestModelWritten, Done, Failed, PreemptedRank, Started, StopSignal
from runner.ranks.watch import RankWatch


class Watch(RankWatch):
    """Ranks whose pidfds are numbers of no process."""

    def started(self, message: Started) -> int | None:
        self.pids[message.rank], self.local_ranks[message.rank] = message.pid, message.local_rank
        self.pidfds[500 + message.rank] = message.rank
        return 500 + message.rank if message.pid != 99 else None

    def died(self, pidfd: int) -> None:
        self.deaths.append(self.pidfds.pop(pidfd))

    def close(self) -> None:
        self.pidfds.clear()


class Bench:
    def __init__(self) -> None:
        self.ranks, self.loop, self.recorded = Watch(), FakeLoop(FakeHost()), list[Event]()
        self.signals: list[int] = []
        self.followed: list[Path] = []
        self.unread: list[Any] = []
        self.finished = False
        bench: Any = self
        loop: Any = self.loop
        self.reports = RankReports(
            self.ranks, bench, relay=bench, record=self.recorded.append, loop=loop, read_rank_messages=self._read
        )

    def on_signal(self, rank: int) -> None:
        self.signals.append(rank)

    def follow(self, folder: Path) -> None:
        self.followed.append(folder)

    def finish(self) -> None:
        self.finished = True

    def _read(self) -> None:
        while self.unread:
            self.reports.handle(self.unread.pop(0))

    def start(self, rank: int, pid: int = 10) -> None:
        self.reports.handle(
            Started(event="rank_started", in_attempt=1, rank=rank, local_rank=rank, pid=pid, error_file="/l/0/e.json")
        )


def test_a_rank_that_starts_is_watched_and_its_output_followed() -> None:
    bench = Bench()
    bench.start(0)
    bench.start(1, pid=99)
    assert bench.recorded == [RankStarted(rank=0, pid=10), RankStarted(rank=1, pid=99)]
    assert bench.followed == [Path("/l/0")] * 2
    assert list(bench.loop.registered) == [500], "a rank that has died already has no descriptor"


def test_messages() -> None:
    bench = Bench()
    for message in (
        Done(event="rank_done", in_attempt=1, rank=0),
        PreemptedRank(event="rank_preempted", in_attempt=1, rank=1),
        Failed(event="rank_failed", in_attempt=1, rank=2, error="E: x", frame="f:1", transient=True),
        StopSignal(event="stop_signal", in_attempt=1, rank=3),
        BestModelWritten(event="best_model", in_attempt=1, step=40),
    ):
        bench.reports.handle(message)
    ranks = bench.ranks
    assert (ranks.done, ranks.preempted, ranks.errors) == ({0}, {1}, {2: ("E: x", "f:1", True)})
    assert bench.signals == [3] and bench.recorded == [BestModel(step=40)]


def test_what_a_rank_sent_before_its_death_is_read_first() -> None:
    bench = Bench()
    bench.start(0)
    bench.unread.append(Done(event="rank_done", in_attempt=1, rank=0))
    bench.loop.registered[500](500)
    assert bench.ranks.deaths == [0] and bench.ranks.failures == [] and not bench.loop.registered


@pytest.mark.parametrize("closes", [True, False])
def test_the_end_of_an_attempt(closes: bool) -> None:
    bench = Bench()
    bench.start(0)
    bench.reports.stop_watching()
    assert not bench.loop.registered and not bench.ranks.pidfds
    if closes:
        bench.reports.close()
    assert bench.finished is closes
