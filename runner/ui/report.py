"""`runner report`: one HTML file with figures, tables and charts of a run, which needs no network."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import plotly.offline
from plotly.utils import PlotlyJSONEncoder

from runner import __version__
from runner.journal.ledger import CAUSES
from runner.system.text import duration
from runner.ui import charts
from runner.ui.timeline import Timeline, goodput_of

_LAST_TIME = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


def render_page(timeline: Timeline, location: str) -> str:
    """Return the report of a run as HTML; `location` is where its journal was found, as the user gave it."""
    return _template().render(
        timeline=timeline,
        run=timeline.run,
        location=location,
        version=__version__,
        began=_utc(timeline.began_at),
        heard=_utc(timeline.run.heard_at or timeline.began_at),
        causes=[cause for cause in CAUSES if timeline.ledger.seconds[cause] > 0],
        colours=charts.COLOURS,
        marks={kind: look for kind, look in charts.MARKS.items() if any(mark.kind == kind for mark in timeline.marks)},
        attempts=_attempts(timeline),
        failures=sum(attempt.failed for attempt in timeline.run.attempts),
        charts=_charts(timeline),
        thinned=max(-(-len(timeline.logs) // charts.MAX_POINTS), 1),
        plotly=plotly.offline.get_plotlyjs(),
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
            "cause": attempt.cause,
            "seconds": sum(timeline.ledger.by_attempt.get(attempt.number, {}).values()),
            "goodput": goodput_of(timeline.ledger, attempt.number),
        }
        for attempt in timeline.run.attempts
    ]


def _charts(timeline: Timeline) -> dict[str, str]:
    """Return the JSON of each chart, safe within a script element."""
    figures = {
        "time-line": charts.time_line(timeline),
        "loss": charts.loss(timeline),
        "nodes": charts.nodes(timeline),
        "where": charts.where_the_time_went(timeline),
        "saves": charts.saves(timeline),
        "throughput": charts.throughput(timeline),
        "memory": charts.memory(timeline),
    }
    return {
        name: json.dumps(charts.style(figure), cls=PlotlyJSONEncoder).replace("<", "\\u003c")
        for name, figure in figures.items()
        if figure.data
    }


def _utc(at: float) -> str:
    # A damaged journal may have any time.
    return datetime.fromtimestamp(min(at, _LAST_TIME), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"duration": duration, "percent": lambda share: f"{100 * share:.1f} %"}
    return environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
