"""The charts: what is drawn where, without a browser."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import pytest
from helpers.journals import entries
from unit.runner.journal.test_ledger import EVENTS, event

from runner.journal.ledger import CAUSES
from runner.ui import charts
from runner.ui.charts import thinned
from runner.ui.timeline import Timeline, build_timeline


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    committed = event(134, "committed", 2, step=60, tier="remote", duration_s=0.5, nbytes=1_000_000)
    waited = event(133, "snapshot_cost", 2, step=60, blocked_s=0.02)
    return build_timeline(entries([*EVENTS[:17], waited, committed, *EVENTS[18:]]))


def traces(figure: go.Figure) -> dict[str, Any]:
    return {trace.name: trace for trace in figure.data}


def test_every_cause_has_a_colour_and_only_training_is_green() -> None:
    assert set(charts.COLOURS) == set(CAUSES)
    assert len(set(charts.COLOURS.values())) == len(CAUSES)


def test_thinned_keeps_the_last_point() -> None:
    assert thinned(range(5), 10) == [0, 1, 2, 3, 4]
    assert thinned(range(101), 10) == [*range(0, 100, 11), 100]
    assert thinned([], 10) == []


def test_the_time_line_has_a_row_per_attempt_and_marks(timeline: Timeline) -> None:
    found = traces(charts.time_line(timeline))
    assert set(found["training"].y) == {"1", "2", "3"}
    assert sum(found["lost work"].x) == pytest.approx(timeline.ledger.seconds["lost work"])
    assert len(found["failure"].x) == 2 and list(found["committed"].y) == ["2"]


def test_lost_steps_are_a_line_of_their_own_with_gaps_between_attempts(timeline: Timeline) -> None:
    found = traces(charts.loss(timeline))
    assert list(found["counts"].x) == [30, None, 60, None, 100]
    assert list(found["lost, recomputed"].x) == [50]


def test_causes_add_up_to_the_wall_time(timeline: Timeline) -> None:
    (bar,) = charts.where_the_time_went(timeline).data
    assert sum(bar.x) == pytest.approx(timeline.ledger.wall_s) and list(bar.x) == sorted(bar.x)


def test_saves_are_drawn_in_milliseconds(timeline: Timeline) -> None:
    found = traces(charts.saves(timeline))
    assert list(found["training waited"].y) == [20.0] and list(found["written (remote)"].y) == [500.0]


def test_a_node_has_a_row_with_the_attempts_that_it_took_part_in(timeline: Timeline) -> None:
    assert charts.nodes(timeline).data == ()
    elastic = build_timeline(
        entries(
            [
                event(100, "run_started", 0, run_id="r"),
                event(100, "attempt_started", 1, nnodes=2, nodes=[0, 1], max_nodes=2),
                event(130, "attempt_ended", 1, kind="node lost", cause="why", step=0, start_step=0),
                event(130, "attempt_started", 2, nnodes=1, nodes=[0], max_nodes=2),
                event(160, "log", 2, step=1, loss=1.0),
            ]
        )
    )
    (bars,) = charts.nodes(elastic).data
    assert list(bars.y) == ["0", "1", "0"] and list(bars.base) == [0, 0, 30] and list(bars.x) == [30, 30, 30]


def test_what_was_not_measured_is_a_gap() -> None:
    logs = [event(112 + step, "log", 1, step=step, loss=3.0) for step in (1, 2)]
    figure = charts.throughput(build_timeline(entries([*EVENTS[:6], *logs])))
    assert set(traces(figure)["tokens/s"].y) <= {None}


def test_the_page_sets_the_colours(timeline: Timeline) -> None:
    drawn = charts.style(charts.memory(timeline))
    layout = drawn["layout"]
    assert layout["paper_bgcolor"] == layout["plot_bgcolor"] == "rgba(0,0,0,0)" and layout["height"] == 320
    assert "color" not in layout["font"]


@pytest.mark.parametrize(("seconds", "unit"), [(0.5, "seconds"), (119, "seconds"), (120, "minutes"), (172800, "days")])
def test_units_that_people_grasp(seconds: float, unit: str) -> None:
    assert charts._unit(seconds)[1] == unit


def test_texts_are_escaped_and_shortened_for_plotly() -> None:
    assert charts._text("<b>") == "&lt;b&gt;"
    assert len(charts._text("x" * 1000)) == 298
