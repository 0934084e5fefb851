"""The report's charts. Colours of text and grid come from the page, which has light, dark and print styles."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import plotly.graph_objects as go

from checkpointing.agent.events import Log
from runner.journal.ledger import CAUSES, LOST, MISSING, NOT_RUNNING, TRAINING
from runner.system.text import duration
from runner.ui.timeline import LogEntry, Timeline

# Distinguishable with colour vision deficiency (Okabe and Ito); only training is green.
COLOURS = {
    TRAINING: "#009e73",
    "checkpoint stall": "#cc79a7",
    "data wait": "#56b4e9",
    "evaluation": "#0072b2",
    LOST: "#d55e00",
    MISSING: "#f0e442",
    "detection": "#e69f00",
    "hang wait": "#a65628",
    "teardown": "#b8860b",
    "backoff": "#8c6bb1",
    "start-up": "#8da0cb",
    "launch": "#5f7fbf",
    "restore": "#66c2a5",
    NOT_RUNNING: "#9e9e9e",
}
# By the name of a mark: plotly's symbol, the same as a character, and the colour.
MARKS = {
    "failure": ("x", "✖", "#d55e00"),
    "save failed": ("triangle-down", "▼", "#e69f00"),
    "quarantined": ("square", "■", "#cc79a7"),
    "committed": ("circle", "●", "#0072b2"),
}
# More points show no more, and make the page slow.
MAX_POINTS = 3000
_UNITS = [(86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds")]

T = TypeVar("T")


def thinned(points: Sequence[T], limit: int = MAX_POINTS) -> list[T]:
    """Return every k-th point and the last one, about `limit` in all."""
    stride = -(-len(points) // limit) or 1
    chosen = list(points[::stride])
    if points and (len(points) - 1) % stride:
        chosen.append(points[-1])
    return chosen


def time_line(timeline: Timeline) -> go.Figure:
    """Draw one row per attempt with its time by cause, and marks where failures and checkpoints happened."""
    scale, unit = _unit(timeline.ledger.wall_s)
    rows = {0: "none"} | {attempt.number: str(attempt.number) for attempt in timeline.run.attempts}
    figure = go.Figure()
    for cause in CAUSES:
        spans = [span for span in timeline.spans if span.cause == cause]
        if spans:
            figure.add_bar(
                name=cause,
                orientation="h",
                base=[span.begin / scale for span in spans],
                x=[(span.end - span.begin) / scale for span in spans],
                y=[rows[span.attempt] for span in spans],
                customdata=[duration(span.end - span.begin) for span in spans],
                hovertemplate="%{customdata} " + cause + "<extra></extra>",
                marker={"color": COLOURS[cause], "line": {"width": 0}},
            )
    for kind, (symbol, _, colour) in MARKS.items():
        marks = thinned([mark for mark in timeline.marks if mark.kind == kind])
        if marks:
            figure.add_scatter(
                name=kind,
                mode="markers",
                x=[mark.at / scale for mark in marks],
                y=[rows.get(mark.attempt, rows[0]) for mark in marks],
                customdata=[_text(mark.text) for mark in marks],
                hovertemplate=kind + ": %{customdata}<extra></extra>",
                marker={
                    "symbol": symbol,
                    "color": colour,
                    "size": 10 if kind == "failure" else 7,
                    "line": {"color": "white", "width": 1},
                },
            )
    _lay_out_rows(figure, "attempt", list(rows.values()), unit)
    return figure


def _lay_out_rows(figure: go.Figure, what: str, names: list[str], unit: str) -> None:
    """Lay out bars over time: one row for each name, the first one at the top."""
    figure.update_layout(
        barmode="overlay",
        showlegend=False,
        bargap=0.25,
        height=min(140 + 34 * len(names), 900),
        xaxis_title=f"{unit} since the start",
        yaxis={"title": what, "type": "category", "autorange": "reversed", "categoryorder": "array"},
    )
    figure.update_yaxes(categoryarray=names)


def nodes(timeline: Timeline) -> go.Figure:
    """Draw one row per node with the attempts that it took part in; nothing for a run of one node."""
    scale, unit = _unit(timeline.ledger.wall_s)
    spans: dict[int, tuple[float, float]] = {}
    for span in timeline.spans:
        begin, end = spans.get(span.attempt, (span.begin, span.end))
        spans[span.attempt] = min(begin, span.begin), max(end, span.end)
    bars = [
        (node, attempt.number, *spans[attempt.number])
        for attempt in timeline.run.attempts
        for node in attempt.nodes
        if attempt.number in spans
    ]
    figure = go.Figure()
    if bars:
        figure.add_bar(
            orientation="h",
            base=[begin / scale for _, _, begin, _ in bars],
            x=[(end - begin) / scale for _, _, begin, end in bars],
            y=[str(node) for node, *_ in bars],
            customdata=[f"attempt {number}, {duration(end - begin)}" for _, number, begin, end in bars],
            hovertemplate="node %{y}: %{customdata}<extra></extra>",
            marker={"color": [COLOURS[TRAINING] if number % 2 else "#0072b2" for _, number, *_ in bars]},
        )
        _lay_out_rows(figure, "node", [str(node) for node in sorted({node for node, *_ in bars})], unit)
    return figure


def loss(timeline: Timeline) -> go.Figure:
    """Draw the loss over steps; steps that were recomputed later are a series of their own."""
    figure = go.Figure()
    kept = thinned([entry for entry in timeline.logs if not entry.lost])
    _lines(figure, kept, "counts", COLOURS[TRAINING], "solid", lambda log: log.loss)
    again = thinned([entry for entry in timeline.logs if entry.lost])
    _lines(figure, again, "lost, recomputed", COLOURS[LOST], "dot", lambda log: log.loss)
    figure.update_layout(xaxis_title="step", yaxis_title="training loss")
    return figure


def where_the_time_went(timeline: Timeline) -> go.Figure:
    """Draw the seconds of each cause."""
    scale, unit = _unit(timeline.ledger.wall_s)
    shown = sorted(((s, cause) for cause, s in timeline.ledger.seconds.items() if s > 0))
    figure = go.Figure(
        go.Bar(
            orientation="h",
            x=[seconds / scale for seconds, _ in shown],
            y=[cause for _, cause in shown],
            customdata=[f"{duration(s)}, {100 * s / timeline.ledger.wall_s:.1f} %" for s, _ in shown],
            hovertemplate="%{y}: %{customdata}<extra></extra>",
            marker={"color": [COLOURS[cause] for _, cause in shown]},
        )
    )
    figure.update_layout(height=120 + 28 * len(shown), xaxis_title=unit, showlegend=False)
    return figure


def saves(timeline: Timeline) -> go.Figure:
    """Draw for each checkpoint how long training waited, and how long the write to each tier took."""
    figure = go.Figure()
    shown = thinned(timeline.saves)
    series = [("training waited", "#cc79a7", [(save.step, save.blocked_s) for save in shown])]
    colours = {"local": "#0072b2", "remote": "#56b4e9"}
    for tier in sorted({tier for save in shown for tier in save.write_s}):
        series.append(
            (_text(f"written ({tier})"), colours.get(tier, "#8da0cb"), [(s.step, s.write_s.get(tier)) for s in shown])
        )
    for name, colour, points in series:
        figure.add_scatter(
            name=name,
            mode="markers",
            x=[step for step, _ in points],
            y=[1000 * seconds if seconds is not None else None for _, seconds in points],
            hovertemplate="step %{x}: %{y:.3g} ms<extra>" + name + "</extra>",
            marker={"color": colour, "size": 7},
        )
    figure.update_layout(xaxis_title="step", yaxis={"title": "milliseconds", "type": "log"})
    return figure


def throughput(timeline: Timeline) -> go.Figure:
    """Draw the tokens per second of all ranks."""
    return _metric(timeline, "tokens_per_s", "tokens/s", "tokens/s", "#0072b2")


def memory(timeline: Timeline) -> go.Figure:
    """Draw the peak memory of rank 0."""
    return _metric(timeline, "peak_memory_gb", "peak memory", "GB", "#cc79a7")


def _metric(timeline: Timeline, metric: str, name: str, unit: str, colour: str) -> go.Figure:
    figure = go.Figure()
    _lines(figure, thinned(timeline.logs), name, colour, "solid", lambda log: log.metric(metric))
    figure.update_layout(xaxis_title="step", yaxis={"title": unit, "rangemode": "tozero"}, showlegend=False)
    return figure


def _lines(
    figure: go.Figure,
    entries: Sequence[LogEntry],
    name: str,
    colour: str,
    dash: str,
    value: Callable[[Log], float | None],
) -> None:
    """Add one line per attempt as one trace, with a gap between two attempts."""
    points: list[tuple[int | None, float | None, str]] = []
    for before, entry in zip([None, *entries], entries, strict=False):
        if before is not None and entry.attempt != before.attempt:
            points.append((None, None, ""))
        points.append((entry.step, value(entry.log), f"attempt {entry.attempt}"))
    if points:
        figure.add_scatter(
            name=name,
            mode="lines+markers" if len(entries) < 60 else "lines",
            x=[step for step, _, _ in points],
            y=[number for _, number, _ in points],
            customdata=[label for _, _, label in points],
            hovertemplate="step %{x}: %{y:.4g}<br>%{customdata}<extra>" + name + "</extra>",
            line={"color": colour, "dash": dash, "width": 2},
            marker={"size": 4},
        )


def style(figure: go.Figure) -> dict[str, Any]:
    """Return a figure, which is changed, as JSON types; the page sets the colours of text, grid and background."""
    figure.update_layout(
        template="none",
        margin={"l": 70, "r": 12, "t": 12, "b": 48},
        height=figure.layout.height or 320,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        hoverlabel={"align": "left"},
        font={"family": "system-ui, sans-serif", "size": 13},
    )
    figure.update_xaxes(automargin=True, zeroline=False)
    figure.update_yaxes(automargin=True, zeroline=False)
    drawn: dict[str, Any] = figure.to_plotly_json()
    return drawn


def _unit(seconds: float) -> tuple[float, str]:
    """Return the seconds of the largest unit of which a duration has at least two, and its name."""
    return next((size, name) for size, name in _UNITS if seconds >= 2 * size or size == 1)


def _text(text: str) -> str:
    """Return a text for plotly, which interprets some HTML; long texts are shortened."""
    return html.escape(text if len(text) < 300 else text[:297] + "…")
