"""What a report says, and that nothing in a journal can break its page."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.journals import entries
from unit.runner.journal.test_ledger import EVENTS, event

from checkpointing.agent.events import Committed, Log, SnapshotCost, TrainingStarted
from runner.journal.events import AttemptEnded, AttemptStarted, Entry
from runner.journal.journal import Journal, read_journal
from runner.ui.report import MAX_ROWS, render_page
from runner.ui.timeline import build_timeline

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }}"


def rendered(journal: list[Entry], location: str, **options: float) -> str:
    return render_page(build_timeline(journal, **options), location)


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
    # What were run nevertheless, a browser would refuse.
    assert "default-src &#39;none&#39;; script-src &#39;sha256-" in page


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


def test_a_long_run_is_no_long_page(tmp_path: Path) -> None:
    """It was 4.8 MB for any run, and had every fourth step of this one."""
    now = itertools.count(1000.0, 1.5)
    journal = Journal(tmp_path / "journal.jsonl", lambda: next(now))
    for number in range(600):
        journal.append(AttemptStarted(), number + 1)
        journal.append(TrainingStarted(step=16 * number, total_steps=9600), number + 1)
        for step in range(16 * number + 1, 16 * number + 19):
            loss = 999.0 if step == 5555 else 5.0
            journal.append(Log(step=step, loss=loss, metrics={"tokens_per_s": 4e4, "peak_memory_gb": 70.0}), number + 1)
        journal.append(SnapshotCost(step=16 * number + 16, blocked_s=0.01), number + 1)
        journal.append(Committed(step=16 * number + 16, nbytes=10**9, duration_s=1.0), number + 1)
        ended = AttemptEnded(kind="crashed", cause="why " * 1000, step=16 * number + 18, start_step=16 * number)
        journal.append(ended, number + 1)
    journal.close()
    began = time.thread_time()
    page = rendered(read_journal(tmp_path / "journal.jsonl"), "r")
    took_s = time.thread_time() - began
    assert len(page) < 1_000_000 and took_s < 10, "0.5 s where nothing else runs"
    assert "999.0" in page, "a peak is seen"
    assert page.count('<td data-of="attempt">') == MAX_ROWS and '<td data-of="attempt">600</td>' in page
    assert f"The newest {MAX_ROWS} of 600." in page and f"Table of the newest {MAX_ROWS} checkpoints" in page


def test_evaluations_and_the_best_step_are_shown() -> None:
    evaluations = [event(150 + step, "evaluated", 3, step=step, eval_loss=3.0 + abs(step - 2)) for step in (1, 2, 3)]
    page = rendered(entries([*EVENTS, *evaluations]), "r")
    assert '<b id="eval-loss">4.0000</b>' in page and '<b id="best">step 2</b>best step: eval_loss 3</li>' in page
    assert "eval_loss" in page and "eval-loss" not in rendered(entries(EVENTS[:6]), "r")


def test_a_runner_that_is_gone_is_not_running() -> None:
    timeline = build_timeline(entries(EVENTS[:8]))
    assert 'class="bad">not running</span>' in render_page(timeline, "r", gone=True)
    assert ">running</span>" in render_page(timeline, "r")


@pytest.mark.parametrize(("state", "style"), [("finished", "good"), ("failed", "bad"), ("preempted", "")])
def test_the_state_of_the_run_is_a_word_in_its_colour(state: str, style: str) -> None:
    """It was `RunState.FINISHED`, in no colour."""
    page = rendered(entries([*EVENTS, event(900, "run_ended", 1, state=state, exit_code=0, reason="r")]), "r")
    heading = re.search(r'<h1>run \S+: <span id="state" class="(\w*)">(.*?)</span></h1>', page)
    assert heading is not None and heading.groups() == (style, state)
    assert f": {state}</title>" in page and "RunState" not in page
