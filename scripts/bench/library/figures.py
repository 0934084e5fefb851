"""Samples by what was measured, and figures and Markdown tables of them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

# What was measured and of what, such as ("blocked_s", "ours"), with the values of all rounds.
Samples = defaultdict[tuple[str, ...], list[float]]


def ratios(values: Iterable[float], others: Iterable[float]) -> list[float]:
    """Return one ratio for each pair of values that were measured side by side."""
    return [value / other for value, other in zip(values, others, strict=True)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Format the median and, from three values on, the quartiles."""
    if not values:
        return "-"
    if len(values) < 3:
        return f"{statistics.median(values):.{digits}f}"
    low, _, high = statistics.quantiles(values, n=4)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}…{high:.{digits}f})"


def table(header: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table; the titles of the columns are separated by `|`."""
    lines = [f"| {header} |", "|" + "---|" * (header.count("|") + 1)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def figure_table(figures: Mapping[str, float]) -> str:
    return table("figure | value", ((f"`{name}`", f"{value:.4g}") for name, value in figures.items()))


def bar_table(figures: Mapping[str, float], bars: Mapping[str, tuple[str, float]], behind: Mapping[str, str]) -> str:
    """Return a table of each figure with its bar (`≤` or `≥`), the verdict, and what is behind it, in words."""

    def row(name: str, value: float) -> tuple[str, ...]:
        sign, bar = bars[name]
        passes = value >= bar if sign == "≥" else value <= bar
        return f"`{name}`", f"{value:.4g}", f"{sign} {bar:.4g}", "PASS" if passes else "MISS", behind[name]

    header = "figure | measured | bar | | behind it: median (quartiles)"
    return table(header, (row(name, value) for name, value in figures.items()))
