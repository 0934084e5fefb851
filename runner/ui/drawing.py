"""Charts as inline SVG with labels in HTML: they fit any width, need no script to be seen, and print.

The drawing is stretched to the width of the page; lines keep their width (`vector-effect`), and text is not part of it.
`page.js` shows the values under a pointer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from runner.system.text import shortened

# Coordinates of a drawing; wider than any screen has dots.
_SIZE = 4000
# Groups of neighbouring points of which the lowest and the highest are drawn: more show no more.
MAX_GROUPS = 500
# Lines with fewer points in all have a dot at each of them.
_DOTTED = 60
_NUM_INTERVALS = 6
# A damaged journal may have any number.
_LARGEST = 1e100

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A series of a chart.

    Attributes:
        name: Its name in the legend.
        colour: Its colour in CSS.
        pieces: Points of each piece, in order, by what the piece is called; there is a gap between two pieces.
        dashed: Whether the line is dashed.
        joined: Whether a line joins the points.
        intervals: For some x, the lowest and the highest value.
    """

    name: str
    colour: str
    pieces: Sequence[tuple[str, Sequence[Point]]]
    dashed: bool = False
    joined: bool = True
    intervals: Sequence[tuple[float, float, float]] = ()

    @property
    def points(self) -> list[Point]:
        """All points."""
        return [point for _, points in self.pieces for point in points]


@dataclass(frozen=True)
class LineChart:
    """Lines over a common axis. Pieces with more points than can be seen are thinned when it is drawn.

    Attributes:
        from_zero: Whether the y axis begins at 0.
        x_log: Whether the x axis is logarithmic, likewise `y_log`.
    """

    lines: Sequence[Line]
    x_title: str
    y_title: str
    from_zero: bool = False
    x_log: bool = False
    y_log: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether it has no point."""
        return not any(line.points for line in self.lines)


@dataclass(frozen=True)
class Bar:
    """A bar of a row, from `begin` to `end`; `title` is shown for it."""

    row: int
    begin: float
    end: float
    colour: str
    title: str


@dataclass(frozen=True)
class Sign:
    """A character at a place of a row; `title` is shown for it."""

    row: int
    at: float
    symbol: str
    colour: str
    title: str


@dataclass(frozen=True)
class RowChart:
    """Bars over a common axis in rows, the first one at the top."""

    rows: Sequence[str]
    bars: Sequence[Bar]
    x_title: str
    y_title: str
    signs: Sequence[Sign] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether it has no bar."""
        return not self.bars


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def of(
        cls, values: Iterable[float], *, is_log: bool = False, from_zero: bool = False, is_wide: bool = False
    ) -> Scale:
        """Return the axis on which all values are; one that is wide begins and ends at a label."""
        shown = [value if abs(value) > 1 / _LARGEST else 0.0 for value in values if abs(value) < _LARGEST]
        shown = [value for value in shown if value > 0 or not is_log]
        low, high = min(shown, default=0.0), max(shown, default=1.0)
        if is_log:
            low, high = 10.0 ** math.floor(math.log10(low or 0.1)), 10.0 ** math.ceil(math.log10(high))
            return cls(low, high if high > low else 10 * low, is_log=True)
        low = min(low, 0.0) if from_zero else low
        if high == low:
            low, high = low - (abs(low) or 1) * (0 if from_zero else 0.5), high + (abs(high) or 1) * 0.5
        if is_wide:
            step = cls(low, high)._step
            low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        return cls(low, high)

    @property
    def _step(self) -> float:
        """The distance between two labels of a linear axis."""
        rough = (self.high - self.low) / _NUM_INTERVALS
        power = 10.0 ** math.floor(math.log10(rough))
        return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)

    def share(self, value: float) -> float:
        """Return where a value is, from 0 at the low end to 1 at the high end; values outside are at the ends."""
        if self.is_log:
            value = max(value, self.low)
            part = math.log10(value / self.low) / math.log10(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return min(max(part, 0.0), 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        """Return the values that have a label, and their labels."""
        if self.is_log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            stride = -(-(last - first) // _NUM_INTERVALS)
            return [(10.0**power, f"{10.0**power:,g}") for power in range(first, last + 1, stride)]
        step = self._step
        digits = max(-math.floor(math.log10(step) + 1e-9), 0)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        wide = digits > 6 or max(abs(self.low), abs(self.high)) >= 1e9
        return [
            (number * step, f"{number * step:.4g}" if wide else f"{number * step:,.{digits}f}")
            for number in range(first, last + 1)
        ]


def thinned(points: Sequence[Point], limit: int = MAX_GROUPS) -> list[Point]:
    """Return the lowest and the highest point of each of `limit` groups of neighbours, so that no peak is lost.

    The first and the last point are kept, too; `2 * limit` points and fewer are returned as they are.
    """
    if len(points) <= 2 * limit:
        return list(points)
    size = -(-len(points) // limit)
    chosen = {0, len(points) - 1}
    for begin in range(0, len(points), size):
        group = range(begin, min(begin + size, len(points)))
        chosen |= {min(group, key=lambda i: points[i][1]), max(group, key=lambda i: points[i][1])}
    return [points[index] for index in sorted(chosen)]


def draw(chart: LineChart | RowChart, label: str) -> Markup:
    """Return a chart as HTML; `label` says to readers that cannot see it what it shows."""
    return _draw_lines(chart, label) if isinstance(chart, LineChart) else _draw_rows(chart, label)


def _draw_lines(chart: LineChart, label: str) -> Markup:
    lines = [(line, _thinned_pieces(line)) for line in chart.lines if line.points]
    points = [point for line, _ in lines for point in line.points]
    bounds = [bound for line, _ in lines for _, *low_and_high in line.intervals for bound in low_and_high]
    x = Scale.of([x for x, _ in points], is_log=chart.x_log)
    y = Scale.of([*(y for _, y in points), *bounds], is_log=chart.y_log, from_zero=chart.from_zero, is_wide=True)
    drawn = [_grid(x, y), *(_path(line, pieces, x, y) for line, pieces in lines)]
    series = [
        {
            "name": line.name,
            "pieces": [
                {"name": name, "x": [x for x, _ in own], "y": [float(f"{y:.6g}") for _, y in own]}
                for name, own in pieces
            ],
        }
        for line, pieces in lines
    ]
    legend = Markup("").join(
        Markup('<li><span class="swatch" style="background:{}"></span>{}</li>').format(line.colour, line.name)
        for line, _ in lines
    )
    return Markup(
        '{}<div class="plot" data-series="{}" data-x="{}"><p class="y-title">{}</p>{}{}{}</div>'
    ).format(
        Markup('<ul class="legend">{}</ul>').format(legend) if len(lines) > 1 else "",
        json.dumps(series, separators=(",", ":")),
        json.dumps({"low": x.low, "high": x.high, "log": x.is_log, "title": chart.x_title}),
        chart.y_title,
        _y_axis([(1 - y.share(value), text) for value, text in y.ticks()]),
        _svg(Markup("").join(drawn), label),
        _x_axis(x, chart.x_title),
    )  # fmt: skip


def _thinned_pieces(line: Line) -> list[tuple[str, list[Point]]]:
    """Return the pieces of a line, each with its share of the points that can be seen."""
    num_points = len(line.points)
    return [
        (name, thinned(points, max(MAX_GROUPS * len(points) // num_points, 1)))
        for name, points in line.pieces
        if points
    ]


def _draw_rows(chart: RowChart, label: str) -> Markup:
    x = Scale.of([at for bar in chart.bars for at in (bar.begin, bar.end)])
    height = _SIZE / len(chart.rows)
    bars = Markup("").join(
        Markup('<rect x="{}" y="{}" width="{}" height="{}" fill="{}"><title>{}</title></rect>').format(
            _at(x.share(bar.begin)),
            round((bar.row + 0.12) * height),
            f"{_SIZE * (x.share(bar.end) - x.share(bar.begin)):.4g}",
            round(0.76 * height),
            bar.colour,
            shortened(bar.title, 300),
        )
        for bar in chart.bars
    )
    signs = Markup("").join(
        Markup('<span class="sign" style="left:{}%;top:{}%;color:{}" title="{}">{}</span>').format(
            f"{100 * x.share(sign.at):.4g}",
            f"{100 * (sign.row + 0.5) / len(chart.rows):.4g}",
            sign.colour,
            shortened(sign.title, 300),
            sign.symbol,
        )
        for sign in chart.signs
    )
    # Names that would overlap are left out.
    stride = -(-len(chart.rows) // 25)
    names = [((row + 0.5) / len(chart.rows), name) for row, name in enumerate(chart.rows) if row % stride == 0]
    return Markup(
        '<div class="plot rows" style="--height:{}rem"><p class="y-title">{}</p>{}{}{}</div>'
    ).format(
        f"{min(max(2 * len(chart.rows), 3), 40):g}",
        chart.y_title,
        _y_axis(names),
        Markup('<div class="field">{}{}</div>').format(_svg(Markup("").join([_grid(x, None), bars]), label), signs),
        _x_axis(x, chart.x_title),
    )  # fmt: skip


def _svg(content: Markup, label: str) -> Markup:
    return Markup('<svg viewBox="0 0 {0} {0}" preserveAspectRatio="none" role="img" aria-label="{1}">{2}</svg>').format(
        _SIZE, label, content
    )


def _grid(x: Scale, y: Scale | None) -> Markup:
    lines = [f"M{_at(x.share(value))} 0V{_SIZE}" for value, _ in x.ticks()]
    if y is not None:
        lines += [f"M0 {_at(1 - y.share(value))}H{_SIZE}" for value, _ in y.ticks()]
    return Markup('<path class="grid" d="{}"/>').format("".join(lines))


def _path(line: Line, pieces: Sequence[tuple[str, Sequence[Point]]], x: Scale, y: Scale) -> Markup:
    placed = [[f"{_at(x.share(a))} {_at(1 - y.share(b))}" for a, b in points] for _, points in pieces]
    dotted = not line.joined or sum(map(len, placed)) < _DOTTED
    # A line of no length with round ends is a dot that the stretched drawing leaves round.
    dots = [at for points in placed for at in points if dotted or len(points) == 1]
    paths = Markup("")
    if line.joined:
        d = "".join(f"M{'L'.join(points)}" for points in placed)
        dashes = Markup(' stroke-dasharray="2 4"') if line.dashed else ""
        paths += Markup('<path class="line" stroke="{}"{} d="{}"/>').format(line.colour, dashes, d)
    if line.intervals:
        d = "".join(f"M{_at(x.share(a))} {_at(1 - y.share(b))}V{_at(1 - y.share(c))}" for a, b, c in line.intervals)
        paths += Markup('<path class="interval" stroke="{}" d="{}"/>').format(line.colour, d)
    if dots:
        d = "".join(f"M{at}h0" for at in dots)
        paths += Markup('<path class="dots" stroke="{}" d="{}"/>').format(line.colour, d)
    return paths


def _at(share: float) -> int:
    return round(_SIZE * share)


def _y_axis(labels: Sequence[tuple[float, str]]) -> Markup:
    """Return labels at shares of the height from the top; the longest one sets the width of the axis."""
    spans = (
        Markup('<span style="top:{}%">{}</span>').format(f"{100 * share:.4g}", text) for share, text in labels
    )  # fmt: skip
    widest = max((text for _, text in labels), key=len, default="")
    return Markup('<div class="y-axis"><i>{}</i>{}</div>').format(widest, Markup("").join(spans))


def _x_axis(x: Scale, title: str) -> Markup:
    spans = (
        Markup('<span style="left:{}%">{}</span>').format(f"{100 * x.share(value):.4g}", text)
        for value, text in x.ticks()
    )
    return Markup('<div class="x-axis">{}</div><p class="x-title">{}</p>').format(Markup("").join(spans), title)
