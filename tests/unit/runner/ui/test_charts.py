"""The charts: what is drawn where, without a browser."""

from __future__ import annotations

import pytest
from helpers.journals import entries
from unit.runner.journal.test_ledger import EVENTS, event

from runner.journal.ledger import CAUSES
from runner.ui import charts
from runner.ui.drawing import Line, LineChart
from runner.ui.timeline import Mark, Timeline, build_timeline


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    committed = event(134, "committed", 2, step=60, tier="remote", duration_s=0.5, nbytes=1_000_000)
    waited = event(133, "snapshot_cost", 2, step=60, blocked_s=0.02)
    return build_timeline(entries([*EVENTS[:17], waited, committed, *EVENTS[18:]]))


def lines(chart: LineChart) -> dict[str, Line]:
    return {line.name: line for line in chart.lines}


def test_every_cause_has_a_colour_and_only_training_is_green() -> None:
    assert set(charts.COLOURS) == set(CAUSES)
    assert len(set(charts.COLOURS.values())) == len(CAUSES)


def test_the_time_line_has_a_row_per_attempt_and_marks(timeline: Timeline) -> None:
    chart = charts.time_line(timeline)
    assert list(chart.rows) == ["none", "1", "2", "3"]
    trained = {bar.row for bar in chart.bars if bar.colour == charts.COLOURS["training"]}
    assert trained == {1, 2, 3}
    lost = [bar for bar in chart.bars if bar.colour == charts.COLOURS["lost work"]]
    assert sum(bar.end - bar.begin for bar in lost) == pytest.approx(timeline.ledger.seconds["lost work"])
    assert lost[0].title.endswith("s lost work")
    signs = [(sign.row, sign.symbol) for sign in chart.signs]
    assert signs == [(2, "●"), (2, "✖"), (1, "✖")]


def test_of_many_attempts_the_newest_have_a_row() -> None:
    events = [event(100, "run_started", 0, run_id="r")]
    for number in range(1, 301):
        events.append(event(100 + 10 * number, "attempt_started", number))
        events.append(
            event(105 + 10 * number, "attempt_ended", number, kind="crashed", cause="c", step=0, start_step=0)
        )
    chart = charts.time_line(build_timeline(entries(events)))
    assert [chart.rows[0], chart.rows[-1], len(chart.rows)] == ["201", "300", charts.MAX_ROWS]
    assert {bar.row for bar in chart.bars} == {sign.row for sign in chart.signs} == set(range(charts.MAX_ROWS))


def test_of_many_marks_the_newest_and_every_kth_are_drawn() -> None:
    marks = [Mark("committed", float(at), 1, "") for at in range(1000)]
    chosen = charts.every_kth(marks, 300)
    assert chosen[0] is marks[-1] and 200 < len(chosen) <= 300 and charts.every_kth([], 300) == []


def test_lost_steps_are_a_line_of_their_own_with_gaps_between_attempts(timeline: Timeline) -> None:
    found = lines(charts.loss(timeline))
    assert [(name, [x for x, _ in points]) for name, points in found["training"].pieces] == [
        ("attempt 1", [30]),
        ("attempt 2", [60]),
        ("attempt 3", [100]),
    ]
    assert found["lost, recomputed"].points == [(50, 6.0)] and found["lost, recomputed"].dashed


def test_evaluations_are_lines_and_the_best_step_is_marked(timeline: Timeline) -> None:
    found = lines(charts.loss(timeline))
    assert found["eval_loss"].points == [(40, 6.5)] == found["best step"].points
    two = [event(112, "evaluated", 1, step=step, eval_a_loss=2.0, eval_b_loss=3.0, eval_runtime=1.0) for step in (5, 6)]
    found = lines(charts.loss(build_timeline(entries([*EVENTS[:6], *two]))))
    assert found["eval_a_loss"].points == [(5, 2.0), (6, 2.0)] and found["eval_b_loss"].points == [(5, 3.0), (6, 3.0)]
    assert "best step" not in found
    by_f1 = event(112, "evaluated", 1, step=5, eval_loss=2.0, eval_f1=0.5, best_by="eval_f1", higher_is_better=True)
    assert "best step" not in lines(charts.loss(build_timeline(entries([*EVENTS[:6], by_f1]))))


def test_saves_are_drawn_in_milliseconds(timeline: Timeline) -> None:
    found = lines(charts.saves(timeline))
    assert found["training waited"].points == [(60, 20.0)] and found["written (remote)"].points == [(60, 500.0)]
    # A logarithm of nothing cannot be drawn.
    free = [
        event(113, "snapshot_cost", 1, step=60, blocked_s=0.0),
        event(114, "committed", 1, step=60, duration_s=0.5, nbytes=1),
    ]
    found = lines(charts.saves(build_timeline(entries([*EVENTS[:6], *free]))))
    assert found["training waited"].points == [(60, 0.01)]


def test_a_node_has_a_row_with_the_attempts_that_it_took_part_in(timeline: Timeline) -> None:
    assert charts.nodes(timeline).is_empty
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
    chart = charts.nodes(elastic)
    assert chart.rows == ["0", "1"]
    assert [(bar.row, bar.begin, bar.end) for bar in chart.bars] == [(0, 0, 30), (1, 0, 30), (0, 30, 60)]


def test_what_was_not_measured_is_not_drawn() -> None:
    logs = [event(112 + step, "log", 1, step=step, loss=3.0) for step in (1, 2)]
    without = build_timeline(entries([*EVENTS[:6], *logs]))
    assert charts.throughput(without).is_empty and charts.memory(without).is_empty
    measured = event(115, "log", 1, step=3, loss=3.0, tokens_per_s=9.0, peak_memory_gb=0.5)
    some = build_timeline(entries([*EVENTS[:6], *logs, measured]))
    assert lines(charts.throughput(some))["tokens/s"].points == [(3, 9.0)]
    assert lines(charts.memory(some))["GB"].points == [(3, 0.5)]


@pytest.mark.parametrize(("seconds", "unit"), [(0.5, "seconds"), (119, "seconds"), (120, "minutes"), (172800, "days")])
def test_units_that_people_grasp(seconds: float, unit: str) -> None:
    assert charts.unit_of(seconds)[1] == unit
