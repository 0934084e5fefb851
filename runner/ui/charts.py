"""The report's charts: which figures of a run each of them shows. How they are drawn is in `drawing`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from checkpointing.agent.events import Log
from runner.journal.ledger import LOST, MISSING, NOT_RUNNING, TRAINING
from runner.system.text import duration
from runner.ui.drawing import Bar, Line, LineChart, Point, RowChart, Sign
from runner.ui.timeline import LogEntry, Mark, Timeline

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
# By the name of a mark: its character and its colour.
MARKS = {
    "committed": ("●", "#0072b2"),
    "save failed": ("▼", "#e69f00"),
    "quarantined": ("■", "#cc79a7"),
    "failure": ("✖", "#d55e00"),
}
# Rows and marks of the time line, the newest ones: more would overlap.
MAX_ROWS = 100
_MAX_MARKS = 300
# Milliseconds; shorter waits are drawn as this on a logarithmic axis.
_SHORTEST_MS = 0.01
_UNITS = [(86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds")]


def time_line(timeline: Timeline) -> RowChart:
    """Return one row per attempt with its time by cause, and marks where failures and checkpoints happened."""
    scale, unit = unit_of(timeline.ledger.wall_s)
    numbers = [attempt.number for attempt in timeline.run.attempts]
    if len(numbers) < MAX_ROWS:
        numbers = [0, *numbers]
    rows = {number: row for row, number in enumerate(numbers[-MAX_ROWS:])}
    bars = [
        Bar(
            rows[span.attempt],
            span.begin / scale,
            span.end / scale,
            COLOURS[span.cause],
            f"{duration(span.end - span.begin)} {span.cause}",
        )
        for span in timeline.spans
        if span.attempt in rows
    ]
    signs = [
        Sign(rows[mark.attempt], mark.at / scale, *MARKS[mark.kind], f"{mark.kind}: {mark.text}")
        for kind in MARKS
        for mark in every_kth([mark for mark in timeline.marks if mark.kind == kind and mark.attempt in rows])
    ]
    names = [str(number) if number else "none" for number in rows]
    return RowChart(names, bars, f"{unit} since the start", "attempt", signs)


def every_kth(marks: Sequence[Mark], limit: int = _MAX_MARKS) -> list[Mark]:
    """Return every k-th mark from the newest one backwards, `limit` at most."""
    return list(marks[::-1][:: -(-len(marks) // limit) or 1])


def nodes(timeline: Timeline) -> RowChart:
    """Return one row per node with the attempts that it took part in; nothing for a run of one node."""
    scale, unit = unit_of(timeline.ledger.wall_s)
    spans: dict[int, Point] = {}
    for span in timeline.spans:
        begin, end = spans.get(span.attempt, (span.begin, span.end))
        spans[span.attempt] = min(begin, span.begin), max(end, span.end)
    found = [attempt for attempt in timeline.run.attempts if attempt.number in spans][-MAX_ROWS:]
    ranks = sorted({node for attempt in found for node in attempt.nodes})
    bars = []
    for attempt in found:
        begin, end = spans[attempt.number]
        colour = COLOURS[TRAINING] if attempt.number % 2 else "#0072b2"
        title = f"attempt {attempt.number}, {duration(end - begin)}"
        bars += [
            Bar(ranks.index(node), begin / scale, end / scale, colour, f"node {node}: {title}")
            for node in attempt.nodes
        ]
    return RowChart([str(node) for node in ranks], bars, f"{unit} since the start", "node")


def loss(timeline: Timeline) -> LineChart:
    """Return the losses over steps; steps that were recomputed later, and evaluations, are series of their own."""
    kept = [entry for entry in timeline.logs if not entry.lost]
    again = [entry for entry in timeline.logs if entry.lost]
    return LineChart(
        [
            Line("training", COLOURS[TRAINING], _by_attempt(kept, lambda log: log.loss)),
            Line("lost, recomputed", COLOURS[LOST], _by_attempt(again, lambda log: log.loss), dashed=True),
            *(
                Line(name, colour, [("", points)])
                for (name, points), colour in zip(
                    _eval_losses(timeline).items(), ("#0072b2", "#cc79a7", "#56b4e9", "#e69f00"), strict=False
                )
            ),
            *_best(timeline),
        ],
        "step",
        "loss",
    )


def _best(timeline: Timeline) -> list[Line]:
    best = timeline.run.best
    # Another metric is on another scale.
    if best is None or not best.metric.endswith("_loss"):
        return []
    return [Line("best step", "#e69f00", [("", [(best.step, best.value)])], joined=False)]


def _eval_losses(timeline: Timeline) -> dict[str, list[Point]]:
    """Return the points of each evaluation loss; there is one per data set."""
    losses: dict[str, list[Point]] = {}
    for step, metrics in timeline.evaluations.items():
        for name, value in metrics.items():
            if name.startswith("eval_") and name.endswith("_loss"):
                losses.setdefault(name, []).append((step, value))
    return losses


def saves(timeline: Timeline) -> LineChart:
    """Return for each checkpoint how long training waited, and how long the write to each tier took."""
    waits = [(save.step, save.blocked_s) for save in timeline.saves if save.blocked_s is not None]
    series = [("training waited", "#cc79a7", waits)]
    colours = {"local": "#0072b2", "remote": "#56b4e9"}
    for tier in sorted({tier for save in timeline.saves for tier in save.write_s}):
        writes = [(save.step, save.write_s[tier]) for save in timeline.saves if tier in save.write_s]
        series.append((f"written ({tier})", colours.get(tier, "#8da0cb"), writes))
    lines = [
        Line(name, colour, [("", [(step, max(1000 * s, _SHORTEST_MS)) for step, s in points])], joined=False)
        for name, colour, points in series
    ]
    return LineChart(lines, "step", "milliseconds", y_log=True)


def throughput(timeline: Timeline) -> LineChart:
    """Return the tokens per second of all ranks."""
    return _metric(timeline, "tokens_per_s", "tokens/s", "#0072b2")


def memory(timeline: Timeline) -> LineChart:
    """Return the peak memory of rank 0."""
    return _metric(timeline, "peak_memory_gb", "GB", "#cc79a7")


def _metric(timeline: Timeline, metric: str, unit: str, colour: str) -> LineChart:
    line = Line(unit, colour, _by_attempt(timeline.logs, lambda log: log.metric(metric)))
    return LineChart([line], "step", unit, from_zero=True)


def _by_attempt(entries: Iterable[LogEntry], value: Callable[[Log], float | None]) -> list[tuple[str, list[Point]]]:
    """Return the points of each attempt; what was not measured is left out."""
    pieces = []
    for attempt, own in groupby(entries, key=lambda entry: entry.attempt):
        points = [(float(entry.step), number) for entry in own if (number := value(entry.log)) is not None]
        if points:
            pieces.append((f"attempt {attempt}", points))
    return pieces


def unit_of(seconds: float) -> tuple[float, str]:
    """Return the seconds of the largest unit of which a duration has at least two, and its name."""
    return next((size, name) for size, name in _UNITS if seconds >= 2 * size or size == 1)
