"""What a report says, and that nothing in a journal can break its page."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from journals import entries
from unit.runner.journal.test_ledger import EVENTS, ended, event

from runner.journal.ledger import account
from runner.ui.report import render_page
from runner.ui.report.charts import thinned
from runner.ui.report.timeline import build_timeline

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }}"


def charts_of(page: str) -> dict[str, Any]:
    body = page[page.rindex("const charts = {") :]
    found = re.findall(r'^  "([a-z-]+)": (\{.*\}),$', body, re.MULTILINE)
    return {name: json.loads(text) for name, text in found}


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
    assert build_timeline(entries(EVENTS)).cost is None and "paid" not in render_page(entries(EVENTS), "r")


@pytest.mark.parametrize("length", range(1, len(EVENTS) + 1))
def test_a_page_at_any_moment(length: int) -> None:
    page = render_page(entries(EVENTS[:length]), "somewhere", now=200.0, price_per_hour=2.0)
    assert "<h1>run r" in page and "Where the time went" in page


def test_text_from_outside_stays_text() -> None:
    events = [dict(one) for one in EVENTS]
    for one in events:
        for key in ("cause", "reason", "kind", "error"):
            if key in one:
                one[key] = EVIL
    events.insert(8, event(116, "commit_failed", 1, step=40, tier="local", error=EVIL))
    page = render_page(entries(events), EVIL)
    assert "<script>alert" not in page and "<img" not in page and "49" not in re.findall(r"\{\{.*?\}\}", page)
    # plotly reads some HTML in its texts.
    assert "onerror" in json.dumps(charts_of(page)["time-line"]) and "<img" not in json.dumps(charts_of(page))


def test_damaged_events_are_passed_over() -> None:
    """Whatever is missing, or of another type."""
    for index in range(1, len(EVENTS)):
        for key in sorted(EVENTS[index].keys() - {"time", "event"}):
            events = [dict(one) for one in EVENTS]
            values: tuple[Any, ...] = (None, "x", [], 1e999)
            for value in values:
                events[index][key] = value
                build_timeline(entries(events))
            del events[index][key]
            build_timeline(entries(events))
    for value in (None, "x", 1e999):
        damaged = (dict.fromkeys(one, value) | {"time": one["time"], "event": one["event"]} for one in EVENTS)
        render_page(entries([EVENTS[0], *damaged]), "r")


def test_a_long_run_is_no_long_page() -> None:
    assert thinned(range(5), 10) == [0, 1, 2, 3, 4]
    assert thinned(range(101), 10) == [*range(0, 100, 11), 100]
    logs = [event(150, "log", 1, step=step, loss=5.0, tokens_per_s=1.0) for step in range(1, 100_001)]
    events = [*EVENTS[:6], *logs, event(160, "run_ended", 1, state="finished", exit_code=0, reason="r")]
    page = render_page(entries(events), "r")
    assert len(page) < 6_000_000 and "every 34th log entry" in page
