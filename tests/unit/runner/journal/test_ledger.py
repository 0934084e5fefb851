from __future__ import annotations

from typing import Any

import pytest
from helpers.journals import entries
from hypothesis import given
from hypothesis import strategies as st

from runner.journal.ledger import CAUSES, NodeChange, account, attempts_of, led_sessions, node_changes, restarts_by_kind

Event = dict[str, Any]


def event(time: float, name: str, attempt: int = 1, **details: Any) -> Event:
    return {"time": time, "event": name, "attempt": attempt, **details}


def ended(
    time: float, attempt: int, kind: str, start: int, step: int, began: float, last: float, failed: float
) -> Event:
    return event(
        time, "attempt_ended", attempt, kind=kind, cause="why", rank=1, step=step, start_step=start,
        training_began=began, last_step_at=last, failed_at=failed, committed_step=0,
    )  # fmt: skip


# Attempt 1: 2 s until ranks are there, 6 s to the first step of which 1 s was spent choosing; steps 0 to 50 in 10 s,
# with 0.5 s of stalls, 1 s of evaluation, 50 x 0.02 s without data; 3 s of silence, 1 s teardown; 3 of 4 s are backoff.
# Attempt 2 resumes from 40: 0.5 s, 1.5 s of which 1 s restores; killed with its runner after 5 s for steps 40 to 60.
# 20 s later a third one, from 60 on, on a machine that takes 1 s to start; it ends well.
EVENTS = [
    event(100, "run_started", 0, run_id="r"),
    event(101, "attempt_started", 1),
    event(103, "rank_started", 1, rank=1),
    event(103.5, "rank_started", 1, rank=0),
    event(108, "restored", 1, step=0, seconds=1.0),
    event(109, "training_started", 1, step=0, total_steps=100),
    event(112, "snapshot_cost", 1, step=20, blocked_s=0.5),
    event(114, "log", 1, step=30, loss=7.0, data_wait_s=0.02),
    event(116, "evaluated", 1, step=40, eval_loss=6.5, eval_runtime=1.0),
    event(118, "log", 1, step=50, loss=6.0, data_wait_s=0.02),
    ended(123, 1, "hung", 0, 50, 109, 119, 122),
    event(124, "backoff", 1, delay_s=3.0),
    event(127, "attempt_started", 2),
    event(127.5, "rank_started", 2, rank=0),
    event(129, "restored", 2, step=40, seconds=1.0),
    event(129, "training_started", 2, step=40, total_steps=100),
    event(134, "log", 2, step=60, loss=5.0, data_wait_s=0.0),
    event(134, "committed", 2, step=60),
    event(154, "run_started", 2, run_id="r"),
    event(155, "attempt_started", 3),
    event(156, "rank_started", 3, rank=0),
    event(158, "training_started", 3, step=60, total_steps=100),
    event(168, "log", 3, step=100, loss=4.0, data_wait_s=0.0),
    ended(169, 3, "finished", 60, 100, 158, 168, 0.0),
    event(170, "run_ended", 3, state="finished", exit_code=0, reason="all ranks finished"),
]


def test_every_second_has_one_cause() -> None:
    ledger = account(entries(EVENTS))
    lost = 10 * 10 / 50
    assert ledger.seconds == pytest.approx(
        {
            "training": (10 - lost) - 0.8 * (0.5 + 1 + 1) + 5 + 10,
            # What was lost is lost with its share of stalls and waits.
            "checkpoint stall": 0.8 * 0.5,
            "data wait": 0.8 * 1.0,
            "evaluation": 0.8 * 1.0,
            "lost work": lost,
            "missing nodes": 0.0,
            "detection": 0.0,
            "hang wait": 3.0,
            # After the ranks' end, and what the last ones took to end.
            "teardown": 1.0 + 1.0 + 1.0 + 1.0,
            "backoff": 3.0,
            "start-up": 1.0 + 5.0 + 0.5 + 1.0 + 2.0,
            "launch": 2.0 + 0.5 + 1.0,
            "restore": 1.0 + 1.0,
            "not running": 20.0,
        },
        abs=0.002,
    )
    assert list(ledger.seconds) == CAUSES
    assert ledger.wall_s == pytest.approx(70.0, abs=0.002)
    assert ledger.goodput == pytest.approx(ledger.seconds["training"] / 70.0)
    assert [attempt.lost_steps for attempt in attempts_of(entries(EVENTS))] == [10, 0, 0]
    assert restarts_by_kind(attempts_of(entries(EVENTS))) == {"hung": 1, "cut off": 1}


def test_an_attempt_that_runs_takes_steps() -> None:
    """A script that logs nothing is no slower for it."""
    running = [*EVENTS[:1], event(101, "attempt_started", 1), event(103, "rank_started", 1, rank=0)]
    running += [event(109, "training_started", 1, step=0), event(119, "progress", 1, step=40)]
    found = account(entries(running), now=149)
    assert (found.seconds["training"], found.seconds["teardown"], found.goodput) == (40, 0, 40 / 49)
    # Its machine may have been lost: what nobody reports is not counted.
    assert account(entries(running), now=10_000).seconds["training"] == 10 + 60
    (attempt,) = attempts_of(entries([*running, event(150, "run_started", 0, run_id="r")]))
    assert (attempt.last_step, attempt.last_step_at) == (40, 119)


def test_a_later_attempt_may_fall_back_further() -> None:
    events = [event(0, "run_started", 0, run_id="r")]
    for number, (start, end) in enumerate(((0, 100), (90, 95), (50, 200)), 1):
        events.append(event(10 * number, "attempt_started", number))
        events.append(ended(10 * number + 9, number, "crashed", start, end, 10 * number + 1, 10 * number + 8, 0.0))
    # 255 steps were computed for 200.
    assert [attempt.lost_steps for attempt in attempts_of(entries(events))] == [50, 5, 0]


def test_spans_have_no_gaps_and_attempts_have_their_share() -> None:
    ledger = account(entries(EVENTS))
    assert ledger.spans[0].begin == 100 and ledger.spans[-1].end == 170
    assert all(left.end == right.begin for left, right in zip(ledger.spans, ledger.spans[1:], strict=False))
    for number, own in ledger.by_attempt.items():
        lengths = sum(span.end - span.begin for span in ledger.spans if span.attempt == number)
        assert sum(own.values()) == pytest.approx(lengths)
    assert ledger.by_attempt[1]["backoff"] == 3.0 and ledger.by_attempt[2]["restore"] == 1.0


@pytest.mark.parametrize("length", range(1, len(EVENTS) + 1))
def test_it_adds_up_at_any_moment(length: int) -> None:
    events = EVENTS[:length]
    assert account(entries(events)).wall_s == pytest.approx(events[-1]["time"] - events[0]["time"], abs=0.01)
    if events[-1]["event"] != "run_ended":
        assert account(entries(events), now=200.0).wall_s == pytest.approx(100.0, abs=0.01)


@given(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=30), st.data())
def test_it_adds_up_whatever_is_told(chosen: list[Event], data: st.DataObject) -> None:
    """In any order, with what is missing missing, and durations that cannot be true."""
    times = sorted(data.draw(st.lists(st.floats(100, 1000), min_size=len(chosen), max_size=len(chosen))))
    events = [{**one, "time": time} for one, time in zip(chosen, times, strict=True)]
    for one in events:
        for name in ("seconds", "blocked_s", "eval_runtime", "delay_s"):
            if name in one and data.draw(st.booleans()):
                one[name] = data.draw(st.floats(-10, 1e6))
    ledger = account(entries(events))
    assert ledger.wall_s == pytest.approx(events[-1]["time"] - events[0]["time"], abs=0.02)
    assert min(ledger.seconds.values()) >= 0


# Nodes 0, 1 and 2 of 3 train for 10 s; 1 is lost, and one step with it; 0 and 2 train for 20 s; 1 comes back.
ELASTIC = [
    event(100, "run_started", 0, run_id="r"),
    event(100, "attempt_started", 1, nnodes=3, nodes=[0, 1, 2], max_nodes=3),
    event(100, "training_started", 1, step=0, total_steps=100),
    event(110, "log", 1, step=10, loss=7.0),
    ended(111, 1, "node lost", 0, 10, 100, 110, 110.5),
    event(111, "attempt_started", 2, nnodes=2, nodes=[0, 2], max_nodes=3),
    event(112, "training_started", 2, step=9, total_steps=100),
    event(122, "snapshot_cost", 2, step=20, blocked_s=2.0),
    event(132, "log", 2, step=29, loss=6.0),
    ended(132, 2, "nodes changed", 9, 29, 112, 132, 0.0),
    event(132, "attempt_started", 3, nnodes=3, nodes=[0, 1, 2], max_nodes=3),
    event(133, "training_started", 3, step=29, total_steps=100),
]


def test_goodput_counts_node_seconds() -> None:
    ledger = account(entries(ELASTIC))
    # Two of three nodes trained for 20 s less the 2 s of the stall.
    assert ledger.seconds["missing nodes"] == pytest.approx(18 / 3)
    assert ledger.seconds["training"] == pytest.approx(9 + 18 * 2 / 3)
    assert ledger.wall_s == pytest.approx(33)


def test_a_change_of_nodes_has_a_price() -> None:
    assert node_changes(attempts_of(entries(ELASTIC))) == [
        NodeChange(2, 9, [], [1], pause_s=2.0, lost_steps=1),
        NodeChange(3, 29, [1], [], pause_s=1.0, lost_steps=0),
    ]
    assert node_changes(attempts_of(entries(EVENTS))) == []


def test_what_a_node_followed_is_left_to_its_leader() -> None:
    followed = [event(90, "run_started", 0, run_id="b", leads=False), event(95, "attempt_started", 1)]
    led = [event(100, "run_started", 1, run_id="b"), event(101, "attempt_started", 2)]
    assert led_sessions(entries([*followed, *led])) == entries(led)
    assert led_sessions(entries(followed)) == []
