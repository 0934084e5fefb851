"""What a report says, and that nothing in a journal can break its page."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from helpers.journals import entries
from unit.runner.journal.test_ledger import EVENTS, event

from runner.journal.events import Entry
from runner.ui.charts import MAX_POINTS
from runner.ui.report import _charts, render_page
from runner.ui.timeline import build_timeline

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }}"


def rendered(journal: list[Entry], location: str, **options: float) -> str:
    return render_page(build_timeline(journal, **options), location)


def charts_of(page: str) -> dict[str, Any]:
    body = page[page.rindex("const charts = {") :]
    found = re.findall(r'^  "([a-z-]+)": (\{.*\}),$', body, re.MULTILINE)
    return {name: json.loads(text) for name, text in found}


@pytest.mark.parametrize("length", range(1, len(EVENTS) + 1))
def test_a_page_at_any_moment(length: int) -> None:
    page = rendered(entries(EVENTS[:length]), "somewhere", now=200.0, price_per_hour=2.0)
    assert "<h1>run r" in page and "Where the time went" in page


def test_costs_are_shown_with_a_price_alone() -> None:
    assert "paid" not in rendered(entries(EVENTS), "r")
    page = rendered(entries(EVENTS), "r", price_per_hour=2.0, spot_discount=0.25)
    assert "2.00 USD per node and hour on demand, less 25.0 %" in page


def test_text_from_outside_stays_text() -> None:
    events = [dict(one) for one in EVENTS]
    for one in events:
        for key in ("cause", "reason", "kind", "error"):
            if key in one:
                one[key] = EVIL
    events.insert(8, event(116, "commit_failed", 1, step=40, tier="local", error=EVIL))
    events.insert(9, event(116, "committed", 1, step=40, tier=EVIL, duration_s=0.5, nbytes=1))
    page = rendered(entries(events), EVIL)
    assert "<script>alert" not in page and "<img" not in page and "49" not in re.findall(r"\{\{.*?\}\}", page)
    # plotly reads some HTML in its texts.
    assert "onerror" in json.dumps(charts_of(page)["time-line"]) and "<img" not in json.dumps(charts_of(page))


def test_charts_cannot_end_their_script_element() -> None:
    """Even where a text is not escaped for plotly: hover texts have tags of their own."""
    assert all("<" not in chart for chart in _charts(build_timeline(entries(EVENTS))).values())


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
        rendered(entries([EVENTS[0], *damaged]), "r")


def test_a_long_run_is_no_long_page() -> None:
    logs = [event(150, "log", 1, step=step, loss=5.0, tokens_per_s=1.0) for step in range(1, 10_001)]
    events = [*EVENTS[:6], *logs, event(160, "run_ended", 1, state="finished", exit_code=0, reason="r")]
    page = rendered(entries(events), "r")
    assert "every 4th log entry" in page
    points = [len(trace["x"]) for chart in charts_of(page).values() for trace in chart["data"]]
    assert 2000 < max(points) <= MAX_POINTS


@pytest.mark.parametrize(("state", "style"), [("finished", "good"), ("failed", "bad"), ("preempted", "")])
def test_the_state_of_the_run_is_a_word_in_its_colour(state: str, style: str) -> None:
    """It was `RunState.FINISHED`, in no colour."""
    page = rendered(entries([*EVENTS, event(900, "run_ended", 1, state=state, exit_code=0, reason="r")]), "r")
    heading = re.search(r'<h1>run \S+: <span class="(\w*)">(.*?)</span></h1>', page)
    assert heading is not None and heading.groups() == (style, state)
    assert f": {state}</title>" in page and "RunState" not in page
