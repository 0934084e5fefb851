"""How charts are drawn: where a value is, what has a label, and that no peak is lost."""

from __future__ import annotations

import html
import json
import random
import re
from typing import Any

import pytest

from runner.ui.drawing import MAX_GROUPS, Bar, Line, LineChart, RowChart, Scale, Sign, draw, thinned


def labels(low: float, high: float, **kind: bool) -> list[str]:
    return [text for _, text in Scale.of([low, high], **kind).ticks()]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10_000, ["0", "2,000", "4,000", "6,000", "8,000", "10,000"]),
        (0.1, 0.4, ["0.10", "0.15", "0.20", "0.25", "0.30", "0.35", "0.40"]),
        (2, 2, ["1.0", "1.5", "2.0", "2.5", "3.0"]),
        (0, 0, ["-0.4", "-0.2", "0.0", "0.2", "0.4"]),
        (-3, 3, ["-3", "-2", "-1", "0", "1", "2", "3"]),
        (0, 4e12, ["0", "1e+12", "2e+12", "3e+12", "4e+12"]),
    ],
)
def test_labels_are_round_numbers(low: float, high: float, expected: list[str]) -> None:
    assert labels(low, high) == expected


def test_labels_of_a_logarithmic_axis_are_powers_of_ten() -> None:
    assert labels(2, 700, is_log=True) == ["1", "10", "100", "1,000"]
    assert labels(1, 1, is_log=True) == ["1", "10"]
    assert len(labels(1e-9, 1e9, is_log=True)) <= 7


@pytest.mark.parametrize("values", [[], [float(10**90)] * 2, [-1.7e308, 1.7e308], [5e-324, 5e-324], [1e-300, 1.0]])
def test_any_numbers_have_an_axis(values: list[float]) -> None:
    for is_log in (True, False):
        scale = Scale.of(values, is_log=is_log, is_wide=True)
        assert 1 < len(scale.ticks()) < 20
        assert all(0 <= scale.share(value) <= 1 for value in [*values, -1.7e308, 1.7e308, 0.0])


def test_values_are_placed_by_their_share_or_by_its_logarithm() -> None:
    assert Scale(10, 20).share(15) == 0.5 and Scale(1, 100, is_log=True).share(10) == 0.5
    assert Scale.of([5, 7], from_zero=True).low == 0 and Scale.of([0.3, 9.4], is_wide=True).high == 10


def test_thinning_keeps_peaks_ends_and_order() -> None:
    random.seed(0)
    points = [(float(step), random.random()) for step in range(10_000)]
    points[4321] = (4321.0, 99.0)
    points[777] = (777.0, -99.0)
    chosen = thinned(points, 100)
    assert len(chosen) <= 202 and chosen == sorted(chosen)
    assert {points[0], points[-1], points[4321], points[777]} <= set(chosen)
    assert thinned(points[:5], 100) == points[:5] and thinned([], 10) == []


def series(drawn: str) -> list[dict[str, Any]]:
    (text,) = re.findall(r'data-series="(.*?)"', drawn)
    return list(json.loads(html.unescape(text)))


def test_lines_are_drawn_where_their_values_are() -> None:
    line = Line("a", "#123456", [("attempt 1", [(0, 0.0), (10, 5.0)]), ("attempt 2", [(10, 10.0)])])
    drawn = draw(LineChart([line, Line("none", "red", [])], "step", "y"), "label")
    assert 'class="line" stroke="#123456" d="M0 4000L4000 2000M4000 0"' in drawn
    assert 'class="dots" stroke="#123456" d="M0 4000h0M4000 2000h0M4000 0h0"' in drawn
    assert series(drawn) == [
        {
            "name": "a",
            "pieces": [{"name": "attempt 1", "x": [0, 10], "y": [0, 5]}, {"name": "attempt 2", "x": [10], "y": [10]}],
        }
    ]
    assert "legend" not in drawn, "one line needs none"


def test_intervals_and_points_that_are_not_joined() -> None:
    line = Line("a", "red", [("", [(1, 1.0), (2, 2.0)])], joined=False, intervals=[(1, 0.0, 3.0)])
    drawn = draw(LineChart([line, line], "x", "y"), "label")
    assert 'class="line"' not in drawn and 'd="M0 4000V0"' in drawn and drawn.count("<li>") == 2


def test_a_piece_of_one_point_among_many_is_seen() -> None:
    line = Line("a", "red", [("", [(step, 1.0) for step in range(200)]), ("", [(300, 2.0)])])
    assert 'class="dots" stroke="red" d="M4000 0h0"' in draw(LineChart([line], "x", "y"), "label")


def test_pieces_share_the_points_that_can_be_seen() -> None:
    long = [(float(step), step % 7.0) for step in range(20_000)]
    line = Line("a", "red", [("long", long), ("short", [(20_001.0, 1.0), (20_002.0, 2.0)])])
    first, second = series(draw(LineChart([line], "x", "y"), "label"))[0]["pieces"]
    assert MAX_GROUPS < len(first["x"]) <= 2 * MAX_GROUPS + 2 and second["x"] == [20001, 20002]


def test_bars_and_signs_of_rows() -> None:
    sign = Sign(1, 7.5, "●", "green", 'committed: "step 3"')
    chart = RowChart(["1", "2"], [Bar(1, 5, 10, "red", "5 s <x>"), Bar(0, 0, 5, "blue", "t")], "s", "attempt", [sign])
    drawn = draw(chart, "label")
    assert '<rect x="2000" y="2240" width="2000" height="1520" fill="red"><title>5 s &lt;x&gt;</title></rect>' in drawn
    assert 'style="left:75%;top:75%;color:green" title="committed: &#34;step 3&#34;"' in drawn


def test_texts_stay_texts_and_are_short() -> None:
    evil = '"><script>alert(1)</script>'
    line = Line(evil, evil, [(evil, [(1.0, 2.0)])])
    for chart in (
        LineChart([line, line], evil, evil),
        RowChart([evil], [Bar(0, 0, 1, evil, evil * 100)], evil, evil, [Sign(0, 1, evil, evil, evil * 100)]),
    ):
        drawn = draw(chart, evil)
        assert "<script" not in drawn and len(drawn) < 20_000
        assert set(re.findall(r"<(\w+)", drawn)) <= {
            "ul",
            "li",
            "span",
            "div",
            "p",
            "i",
            "svg",
            "path",
            "rect",
            "title",
        }
