"""The figures of a report, from a journal."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.journals import entries
from unit.runner.journal.test_ledger import EVENTS, ended, event

from runner.journal.ledger import account
from runner.ui.timeline import Mark, build_timeline, goodput_of, undisturbed_s


def test_what_is_lost_is_shown_where_it_was_made() -> None:
    committed = event(134, "committed", 2, step=60, tier="local", duration_s=0.5, nbytes=1_000_000)
    timeline = build_timeline(entries([*EVENTS[:17], committed, *EVENTS[18:]]))
    assert [(log.attempt, log.step, log.lost) for log in timeline.logs] == [
        (1, 30, False), (1, 50, True), (2, 60, False), (3, 100, False),
    ]  # fmt: skip
    by_cause: dict[str, list[tuple[Any, ...]]] = {}
    for span in timeline.spans:
        by_cause.setdefault(span.cause, []).append((span.begin, span.end, span.attempt))
    assert by_cause["lost work"] == [(pytest.approx(17.0), 19, 1)]
    assert [span.begin for span in timeline.spans[1:]] == pytest.approx([span.end for span in timeline.spans[:-1]])
    assert [(mark.kind, mark.attempt) for mark in timeline.marks] == [("failure", 1), ("failure", 2), ("committed", 2)]


def test_money() -> None:
    """70 s of which 20 had no machine; the steps would have taken one start (9 s), their own time and one end (1 s)."""
    cost = build_timeline(entries(EVENTS), price_per_hour=3600, spot_discount=0.75).cost
    assert cost is not None and cost.node_s == pytest.approx(50)
    ledger = account(entries(EVENTS))
    in_steps = sum(ledger.seconds[cause] for cause in ("training", "checkpoint stall", "data wait", "evaluation"))
    undisturbed = in_steps + (1 + 2 + 1 + 5) + ledger.by_attempt[3]["teardown"]
    assert cost.paid == pytest.approx(50 / 4)
    assert cost.on_demand == pytest.approx(undisturbed, abs=0.01)
    assert cost.lost == pytest.approx((50 - undisturbed) / 4, abs=0.01)
    assert cost.saved == pytest.approx(undisturbed - 50 / 4, abs=0.01)


def test_nothing_is_lost_where_nothing_fails() -> None:
    quiet = [
        event(0, "run_started", 0, run_id="r"), event(60, "attempt_started", 1), event(62, "rank_started", 1, rank=0),
        event(70, "training_started", 1, step=0, total_steps=100), event(170, "log", 1, step=100, loss=4.0),
        ended(171, 1, "finished", 0, 100, 70, 170, 0.0),
        event(171, "run_ended", 1, state="finished", exit_code=0, reason="r"),
    ]  # fmt: skip
    cost = build_timeline(entries(quiet), price_per_hour=10).cost
    assert cost is not None and cost.lost == pytest.approx(0) and cost.saved == pytest.approx(0)


def test_money_as_the_run_was_started_with() -> None:
    started = {**EVENTS[0], "cost": {"price_per_hour": 36.0, "spot_discount": 0.5, "currency": "EUR"}}
    machines = [{**one, "nnodes": 2} if one["event"] == "attempt_started" else one for one in EVENTS[1:]]
    cost = build_timeline(entries([started, *machines])).cost
    assert cost is not None and (cost.currency, cost.spot_discount) == ("EUR", 0.5)
    assert cost.node_s == pytest.approx(100) and cost.paid == pytest.approx(0.5)
    assert build_timeline(entries(EVENTS)).cost is None


def test_a_price_given_later_replaces_the_one_of_the_start() -> None:
    started = {**EVENTS[0], "cost": {"price_per_hour": 36.0, "spot_discount": 0.5}}
    cost = build_timeline(entries([started, *EVENTS[1:]]), price_per_hour=3600.0, spot_discount=0.0).cost
    assert cost is not None and cost.paid == pytest.approx(50)


def test_saves_have_the_times_of_their_tiers_and_of_the_wait() -> None:
    saves = [
        event(115, "snapshot_cost", 1, step=40, blocked_s=0.02),
        event(116, "committed", 1, step=40, tier="local", duration_s=0.5, nbytes=1000),
        event(118, "committed", 1, step=40, tier="remote", duration_s=2.5, nbytes=1000),
        # One whose snapshot was not measured, of a later attempt.
        event(134, "committed", 2, step=40, tier="local", duration_s=0.7, nbytes=900),
    ]
    first, second = build_timeline(entries([*EVENTS[:6], *saves])).saves
    assert (first.attempt, first.blocked_s, first.write_s, first.nbytes) == (
        1,
        0.02,
        {"local": 0.5, "remote": 2.5},
        1000,
    )
    assert (second.attempt, second.blocked_s, second.write_s) == (2, None, {"local": 0.7})


def test_marks_say_what_happened() -> None:
    moments = [
        event(116, "commit_failed", 1, step=40, tier="remote", error="503"),
        event(117, "checkpoint_quarantined", 1, step=30, reason="digest", kept_as="x"),
    ]
    timeline = build_timeline(entries([*EVENTS[:6], *moments]))
    assert [mark for mark in timeline.marks if mark.kind != "committed"] == [
        Mark("save failed", 116 - timeline.began_at, 1, "503"),
        Mark("quarantined", 117 - timeline.began_at, 1, "digest"),
    ]


def test_the_goodput_of_an_attempt() -> None:
    ledger = account(entries(EVENTS))
    own = ledger.by_attempt[1]
    assert goodput_of(ledger, 1) == pytest.approx(own["training"] / sum(own.values()))
    assert goodput_of(ledger, 99) == 0.0


def test_an_undisturbed_run_has_one_start_only() -> None:
    timeline = build_timeline(entries(EVENTS))
    starts = sum(timeline.ledger.seconds[cause] for cause in ("start-up", "launch", "restore"))
    in_steps = sum(
        timeline.ledger.seconds[cause] for cause in ("training", "checkpoint stall", "data wait", "evaluation")
    )
    assert in_steps < undisturbed_s(timeline.ledger, timeline.run.attempts) < in_steps + starts
