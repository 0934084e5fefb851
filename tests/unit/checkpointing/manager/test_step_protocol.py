"""What is due at a step boundary, for a single rank: an exchange is read at the next step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from checkpointing.host.heartbeat import CommitReport
from checkpointing.manager import step_protocol
from checkpointing.manager.step_protocol import Due, Measured, StepProtocol
from checkpointing.process.ranks import FlagSync
from checkpointing.snapshot.cadence import Cadence, CadenceClock


class Rank:
    """One rank's protocol, and what it decides by."""

    def __init__(self, cadence: Cadence, *, is_first: bool = True) -> None:
        self.stop, self.last_commit, self.committed = False, CommitReport(), set[int]()
        self.protocol = StepProtocol(
            FlagSync(None),
            CadenceClock(cadence, self.now),
            is_first=is_first,
            stop_wanted=lambda: self.stop,
            differs=lambda: self.differs,
            saves_wanted=lambda: self.saves,
            measure=lambda: Measured(0.01, False, self.last_commit),
            is_committed=self.committed.__contains__,
        )

    now, differs, saves = 0.0, False, 0

    def step(self, number: int, seconds: float = 2.0) -> Due:
        Rank.now += seconds
        return self.protocol.end_of_step(number)


@pytest.fixture(autouse=True)
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    Rank.now = 100.0
    monkeypatch.setattr(step_protocol, "time", SimpleNamespace(monotonic=lambda: Rank.now))


def test_what_goes_by_steps_is_due_at_once() -> None:
    rank = Rank(Cadence(snapshot_steps=2, save_steps=4))
    assert [rank.step(number) for number in (1, 2, 3, 4)] == [
        Due(),
        Due(snapshot=True),
        Due(),
        Due(snapshot=True, save=True),
    ]


def test_what_goes_by_time_is_due_a_step_after_rank_0_asked_for_it() -> None:
    rank = Rank(Cadence(save_minutes=0.1))
    dues = [rank.step(number) for number in range(1, 5)]
    assert dues == [Due(), Due(), Due(), Due(save=True)]
    rank.protocol.saved(commit=True)
    # The exchange that was under way asked for nothing: what was agreed on was about to be done.
    assert [rank.step(number).save for number in range(5, 9)] == [False, False, False, True]


@pytest.mark.parametrize("is_first", [True, False])
def test_any_rank_passes_on_a_request_to_save_once(is_first: bool) -> None:
    rank = Rank(Cadence(), is_first=is_first)
    assert rank.step(1) == Due()
    rank.saves = 1
    dues = [rank.step(number) for number in range(2, 6)]
    assert dues == [Due(), Due(save=True), Due(), Due()]
    # Two that come at once are one checkpoint; one that comes while another is agreed on is another.
    rank.saves = 3
    assert not rank.step(6).save
    rank.saves = 4
    assert [rank.step(number).save for number in range(7, 11)] == [True, True, False, False]


def test_a_request_to_save_that_an_evaluation_drops_is_passed_on_again() -> None:
    rank = Rank(Cadence())
    rank.saves = 1
    rank.step(1)
    rank.protocol.agree_to_stop()
    rank.protocol.agree_to_stop()
    assert [rank.step(number).save for number in (2, 3, 4)] == [False, True, False]


def test_only_rank_0_goes_by_its_clock() -> None:
    rank = Rank(Cadence(save_minutes=0.1), is_first=False)
    assert [rank.step(number) for number in range(1, 9)] == [Due()] * 8


def test_a_request_to_stop_is_agreed_on_by_the_next_step() -> None:
    rank = Rank(Cadence(), is_first=False)
    rank.stop = True
    assert [rank.step(1).stop, rank.step(2).stop] == [False, True]


def test_any_rank_tells_the_others_of_a_difference() -> None:
    rank = Rank(Cadence(), is_first=False)
    rank.differs = True
    assert [rank.step(1).differs, rank.step(2).differs] == [False, True]


def test_between_steps_a_stop_is_agreed_on_by_the_next_call() -> None:
    rank = Rank(Cadence())
    rank.stop = True
    assert [rank.protocol.agree_to_stop(), rank.protocol.agree_to_stop()] == [False, True]
    rank.protocol.drain()


def test_short_steps_exchange_once_a_second() -> None:
    rank = Rank(Cadence())
    for number in range(1, 21):
        rank.step(number, seconds=0.1)
    rank.stop = True
    num_steps = next(number for number in range(1, 30) if rank.step(20 + number, seconds=0.1).stop)
    # Up to ten until the next exchange, and one to read it.
    assert 2 <= num_steps <= 11


@pytest.mark.parametrize(
    ("last", "committed", "answer"),
    [(10, {10}, Due(committed=True)), (15, {10, 15}, Due(committed=True)), (15, {15}, Due(not_committed=True))],
)
def test_who_awaits_a_commit_is_answered_once(last: int, committed: set[int], answer: Due) -> None:
    rank = Rank(Cadence())
    rank.protocol.awaited = 10
    assert [rank.step(1), rank.step(2)] == [Due(), Due()]
    rank.last_commit = CommitReport(last)
    rank.committed.update(committed)
    assert [rank.step(number) for number in (3, 4, 5, 6)] == [Due(), answer, Due(), Due()]


def test_an_answer_that_comes_in_an_evaluation_is_not_lost() -> None:
    rank = Rank(Cadence())
    rank.protocol.awaited, rank.last_commit = 4, CommitReport(4)
    assert rank.step(5) == Due()
    assert [rank.protocol.agree_to_stop(), rank.protocol.agree_to_stop()] == [False, False]
    assert [rank.step(6), rank.step(7)] == [Due(committed=True), Due()]
