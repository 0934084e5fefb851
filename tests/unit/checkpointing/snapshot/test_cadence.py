from __future__ import annotations

import functools
import math
import random

import pytest

from checkpointing.host.heartbeat import CommitReport
from checkpointing.snapshot.cadence import PRIOR_MTBF_S, Cadence, CadenceClock, CostModel, best_interval_s, mtbf_s

DAY = 86_400.0


@pytest.mark.parametrize(
    ("cost_s", "mtbf", "cap", "expected_s"),
    [
        (0.5, DAY, 0.01, math.sqrt(2 * 0.5 * DAY)),  # Young
        (0.5, 3600, 0.5, math.sqrt(2 * 0.5 * 3600)),
        (60, 3600, 0.01, 6000),  # the cap is the limit
        (100, 40, 1, 100),  # It costs more than the time between failures: only the cap applies.
    ],
)
def test_the_interval_is_youngs_within_the_cap(cost_s: float, mtbf: float, cap: float, expected_s: float) -> None:
    assert best_interval_s(cost_s, mtbf, cap) == pytest.approx(expected_s, rel=0.03)


def test_failures_shorten_the_interval() -> None:
    assert mtbf_s(0, 0) == PRIOR_MTBF_S
    assert mtbf_s(9, 36_000) == pytest.approx((DAY + 36_000) / 10)


def test_steps_are_due_by_number() -> None:
    clock = CadenceClock(Cadence(snapshot_steps=5, save_steps=20), now=0)
    assert [clock.due_by_step(step) for step in (4, 5, 20)] == [(False, False), (True, False), (True, True)]
    assert clock.due_by_time(1e6, 1.0, CommitReport()) == (False, False)


def test_auto_learns_the_price_first_and_then_waits() -> None:
    clock = CadenceClock(Cadence("auto", "auto"), now=0.0)
    assert clock.due_by_time(1.0, None, CommitReport()) == (True, True)
    clock.done(1.0, commit=True)
    # No commit has returned yet: a second one is requested, but not at once.
    assert clock.due_by_time(2.0, 0.01, CommitReport()) == (False, False)
    assert clock.due_by_time(70.0, 0.01, CommitReport())[1]
    report = CommitReport(step=1, duration_s=3.0, cpu_s=0.5)
    snapshot_at = 1.0 + best_interval_s(0.01, DAY, 0.01)
    commit_at = 1.0 + best_interval_s(0.51, DAY, 0.01)
    assert snapshot_at < commit_at
    assert clock.due_by_time(snapshot_at - 1, 0.01, report) == (False, False)
    assert clock.due_by_time(snapshot_at + 1, 0.01, report) == (True, False)
    assert clock.due_by_time(commit_at + 1, 0.01, report) == (True, True)


def test_minutes_are_kept() -> None:
    clock = CadenceClock(Cadence(save_minutes=0.5), now=100.0)
    assert clock.due_by_time(129.0, None, CommitReport()) == (False, False)
    assert clock.due_by_time(130.0, None, CommitReport()) == (False, True)
    clock.done(131.0, commit=False)
    assert clock.due_by_time(131.0, None, CommitReport())[1]


@pytest.mark.parametrize(
    "bad", [{"snapshot_steps": 0}, {"save_steps": "often"}, {"save_minutes": 0}, {"overhead_cap": 1.5}]
)
def test_nonsense_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Cadence(**bad)  # type: ignore[arg-type]


def feed(model: CostModel, overlapped_cost: float, blocking_cost: float, rounds: int = 20) -> list[bool]:
    chosen = []
    for _ in range(rounds):
        model.plain_step(1.0)
        chosen.append(model.overlap)
        cost = overlapped_cost if model.overlap else blocking_cost
        if model.overlap:
            model.snapshot(blocked_s=0.001, compute_s=1.0 + cost, copy_s=0.2, overlapped=True)
        else:
            model.snapshot(blocked_s=cost, compute_s=1.0, copy_s=0.2, overlapped=False)
    return chosen


def test_overlapping_stays_where_it_costs_little() -> None:
    model = CostModel()
    assert all(feed(model, 0.02, 0.2))
    assert model.snapshot_s == pytest.approx(0.021)


def test_the_price_is_that_of_the_way_in_which_snapshots_are_made() -> None:
    """A script may forbid overlapping, and a state that something else changes cannot be copied during training."""
    model = CostModel()
    model.plain_step(1.0)
    model.snapshot(blocked_s=0.3, compute_s=1.0, copy_s=0.2, overlapped=False)
    assert model.overlap and model.snapshot_s == pytest.approx(0.3)


def test_blocking_is_chosen_where_it_is_measured_to_be_cheaper() -> None:
    chosen = feed(CostModel(), 0.9, 0.25)
    assert chosen[:3] == [True] * 3 and not any(chosen[3:])


def test_a_suspicion_that_proves_wrong_is_dropped() -> None:
    chosen = feed(CostModel(), 0.5, 0.7)
    assert chosen[3:6] == [False] * 3 and all(chosen[6:])


def test_steps_that_vary_anyway_do_not_end_overlapping() -> None:
    generator = random.Random(0)
    models = [CostModel() for _ in range(100)]
    for model in models:
        for _ in range(20):
            for _ in range(4):
                model.plain_step(generator.gauss(1.0, 0.2))
            if model.overlap:
                model.snapshot(blocked_s=0.001, compute_s=generator.gauss(1.25, 0.2), copy_s=0.2, overlapped=True)
            else:
                model.snapshot(blocked_s=0.2, compute_s=generator.gauss(1.05, 0.2), copy_s=0.2, overlapped=False)
    assert sum(not model.overlap for model in models) <= 10


def test_what_the_device_waited_for_at_a_steps_start_is_counted_once() -> None:
    """Where the script waits for its device before the optimizer, the step takes longer by so much."""
    model = CostModel()
    model.plain_step(1.0)
    cost = functools.partial(model.snapshot, blocked_s=0.25, copy_s=0.5, overlapped=False)
    assert cost(compute_s=1.5, begin_s=0.5) == cost(compute_s=1.0, begin_s=0.5) == 0.75
    assert cost(compute_s=1.5) == 0.75
