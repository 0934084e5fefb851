"""`runner report`: one HTML file with figures, tables and charts of a run, which needs no network."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from runner import __version__
from runner.journal.ledger import CAUSES
from runner.system.text import shortened
from runner.ui import charts, web_page
from runner.ui.drawing import LineChart, RowChart
from runner.ui.status import GONE, state_of
from runner.ui.timeline import Timeline, goodput_of

_LAST_TIME = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
# Rows of a table, the newest ones: the page of a run that was reclaimed a thousand times opens on a phone, too.
MAX_ROWS = 300
_CAUSE_CHARACTERS = 500


def render_page(timeline: Timeline, location: str, *, gone: bool = False, live_s: float | None = None) -> str:
    """Return the report of a run as HTML.

    Args:
        timeline: The run.
        location: Where its journal was found, as the user gave it.
        gone: Whether its runner has ended without reporting.
        live_s: Seconds after which the page asks its server for newer figures; None for a file.
    """
    run = timeline.run
    return web_page.render(
        "report.html",
        live_s,
        timeline=timeline,
        run=run,
        state=state_of(run, gone=gone),
        reason=GONE if gone and not run.state.is_over else run.reason,
        location=location,
        version=__version__,
        began=_utc(timeline.began_at),
        heard=_utc(run.heard_at or timeline.began_at),
        causes=[cause for cause in CAUSES if timeline.ledger.seconds[cause] > 0],
        colours=charts.COLOURS,
        marks={kind: look for kind, look in charts.MARKS.items() if any(mark.kind == kind for mark in timeline.marks)},
        attempts=_attempts(timeline),
        saves=timeline.saves[-MAX_ROWS:],
        failures=sum(attempt.failed for attempt in run.attempts),
        charts=_charts(timeline),
    )


def _attempts(timeline: Timeline) -> list[dict[str, Any]]:
    return [
        {
            "number": attempt.number,
            "began": _utc(attempt.began),
            "nodes": ", ".join(map(str, attempt.nodes)),
            "steps": attempt.step_range,
            "lost": attempt.lost_steps,
            "kind": attempt.kind,
            "cause": shortened(attempt.cause, _CAUSE_CHARACTERS),
            "seconds": sum(timeline.ledger.by_attempt.get(attempt.number, {}).values()),
            "goodput": goodput_of(timeline.ledger, attempt.number),
        }
        for attempt in timeline.run.attempts[-MAX_ROWS:]
    ]


def _charts(timeline: Timeline) -> dict[str, LineChart | RowChart]:
    """Return the charts that show something."""
    figures: dict[str, LineChart | RowChart] = {
        "time-line": charts.time_line(timeline),
        "loss": charts.loss(timeline),
        "nodes": charts.nodes(timeline),
        "saves": charts.saves(timeline),
        "throughput": charts.throughput(timeline),
        "memory": charts.memory(timeline),
    }
    return {name: figure for name, figure in figures.items() if not figure.is_empty}


def _utc(at: float) -> str:
    # A damaged journal may have any time.
    return datetime.fromtimestamp(min(at, _LAST_TIME), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
