"""The simulation against what can be computed by hand."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from helpers.journals import entries
from hypothesis import given
from hypothesis import strategies as st
from unit.runner.journal.test_ledger import EVENTS

from runner.errors import UsageError
from runner.plan.simulate.engine import Nodes, forecast, simulate
from runner.plan.simulate.scenario import HOUR_S, Scenario, learn
from runner.plan.simulate.study import Study, choices, read_trace, scenario_of, to_page, variations

FOUR = Scenario(work_s=1.0, mttf_s=1.0, nodes=4, min_nodes=2, node_wait_s=100.0, grow_interval_s=30.0)
QUIET = Scenario(
    work_s=1000.0, mttf_s=math.inf, first_start_s=10.0, first_snapshot_s=100.0, snapshot_interval_s=100.0,
    snapshot_s=0.0, snapshot_stall_s=1.0, hang_share=0.0, node_loss_share=0.0,
)  # fmt: skip


class Kinds(random.Random):
    """Which failures lose a node: those with less than `node_loss_share`."""

    def __init__(self, kinds: list[float]) -> None:
        super().__init__(0)
        self._left = kinds

    def random(self) -> float:
        return self._left.pop(0)


def test_without_failures() -> None:
    """One start, ten snapshots, and nothing else."""
    out = simulate(QUIET, random.Random(0))
    assert out.wall_s == pytest.approx(10 + 1000 + 10) and out.interruptions == 0
    assert out.seconds["training"] == pytest.approx(1000) and out.seconds["checkpoint stall"] == pytest.approx(10)


def test_one_failure_by_hand() -> None:
    """At 350 s: 10 s of start, 340 s in steps: 3 snapshots, with their stalls 303 s, and 37 s more, which are lost."""
    scenario = QUIET.with_(detection_s=2.0, restart_s=5.0, restore_memory_s=3.0)
    out = simulate(scenario, random.Random(0), iter([350.0, 1e9]))
    assert out.interruptions == 1 and out.seconds["lost work"] == pytest.approx(37)
    assert out.seconds["start-up"] == pytest.approx(15) and out.seconds["restore"] == pytest.approx(3)
    assert out.seconds["detection"] == pytest.approx(2) and out.seconds["training"] == pytest.approx(1000)
    assert out.wall_s == pytest.approx(350 + 2 + 5 + 3 + 700 + 7)
    # The third one is not whole yet.
    early = simulate(scenario.with_(snapshot_s=38.0), random.Random(0), iter([350.0, 1e9]))
    assert early.seconds["lost work"] == pytest.approx(101 + 37)


def test_a_lost_machine_goes_back_to_storage() -> None:
    """Commits every 200 s, durable after 20 s: of 340 s in steps, 202 + 20 are past the first commit."""
    scenario = QUIET.with_(
        node_loss_share=1.0, commit_interval_s=200.0, commit_s=20.0, node_wait_s=60.0, restore_storage_s=7.0
    )
    out = simulate(scenario, random.Random(0), iter([350.0, 1e9]))
    assert out.seconds["lost work"] == pytest.approx(340 - 202)
    assert out.seconds["not running"] == 60 and out.seconds["restore"] == 7
    assert out.seconds["start-up"] == 20 and out.seconds["training"] == pytest.approx(1000)
    # Not durable yet: all is lost.
    early = simulate(scenario, random.Random(0), iter([10 + 202 + 19.0, 1e9]))
    assert early.seconds["lost work"] == pytest.approx(202 + 19)


TWO = QUIET.with_(
    nodes=2, node_loss_share=1.0, detection_s=2.0, restart_s=5.0, restore_memory_s=3.0, restore_storage_s=70.0,
    node_wait_s=60.0, grow_interval_s=0.0, stop_s=1.0, backoff_initial_s=0.0, backoff_jitter_s=0.0,
)  # fmt: skip


def test_the_others_continue_until_the_lost_node_is_replaced() -> None:
    """At 350 s: three snapshots of 340 s in steps, so 37 s are lost; the replacement comes 60 s later."""
    out = simulate(TWO, random.Random(0), iter([350.0, 1e9]))
    assert out.seconds["lost work"] == pytest.approx(37) and out.seconds.get("not running", 0.0) == 0
    # Of the 60 s, 8 are for the start on one node; the other 52 s count half.
    assert out.seconds["missing nodes"] == pytest.approx(52 / 2)
    assert out.seconds["start-up"] == pytest.approx(10 + 5 + 5) and out.seconds["restore"] == pytest.approx(3 + 3)
    assert out.seconds["teardown"] == 1 and out.seconds["training"] == pytest.approx(1000)
    # Not sooner than `grow_interval_s` after the loss.
    later = simulate(TWO.with_(grow_interval_s=100.0), random.Random(0), iter([350.0, 1e9]))
    assert later.seconds["missing nodes"] == pytest.approx(92 / 2)


def test_a_spare_takes_the_place_of_a_lost_node_at_once() -> None:
    out = simulate(TWO.with_(spares=1, min_nodes=2), random.Random(0), iter([350.0, 1e9]))
    assert "missing nodes" not in out.seconds and out.seconds.get("not running", 0.0) == 0
    assert out.wall_s == pytest.approx(350 + 2 + 5 + 3 + 700 + 7)
    # The second loss comes before the first replacement, and waits for the rest of it.
    twice = simulate(TWO.with_(spares=1, min_nodes=2), random.Random(0), iter([350.0, 20.0, 1e9]))
    assert twice.seconds["not running"] == pytest.approx(60 - 20 - 2)


def test_too_few_nodes_wait() -> None:
    """What the other node holds is not lost, but the run waits."""
    out = simulate(TWO.with_(min_nodes=2), random.Random(0), iter([350.0, 1e9]))
    assert out.seconds["not running"] == 60 and out.seconds["lost work"] == pytest.approx(37)
    assert "missing nodes" not in out.seconds and out.seconds["restore"] == 3


def test_fewer_nodes_fail_less_often() -> None:
    """A failure after 200 s of the whole run is one after 400 s of half of it."""
    scenario = TWO.with_(work_s=1e6, node_wait_s=1e6)
    drawn = iter([100.0, 200.0, 1e12])

    class Draws(random.Random):
        def expovariate(self, rate: float) -> float:
            return next(drawn)

    out = simulate(scenario.with_(mttf_s=1.0), Draws(0))
    assert out.interruptions == 2
    # The second one hits one node of two, so the run waits for the first replacement.
    assert out.seconds["not running"] == pytest.approx(1e6 - 400 - 2)


def test_a_reclaimed_node_costs_no_step() -> None:
    out = simulate(TWO.with_(reclaim_s=1e300), Reclaims([350.0, 1e300]), iter([1e300]))
    assert out.seconds.get("lost work", 0.0) == 0 and out.seconds["missing nodes"] == pytest.approx(52 / 2)


class Reclaims(random.Random):
    def __init__(self, seconds: list[float]) -> None:
        super().__init__(0)
        self._left = seconds

    def expovariate(self, rate: float) -> float:
        return self._left.pop(0)


def test_what_to_do_about_lost_nodes_is_compared() -> None:
    scenario = scenario_of([], 24.0, 8.0, 0.0, ["nodes=16", "min_nodes=12"])
    study = Study(scenario, choices(scenario), runs=60, seed=0)
    waits, shrinks, spare, both = (seen.goodput for seen in study.forecasts)
    assert waits < shrinks <= both + 0.01 and waits < spare
    assert study.of_paid_nodes({"spares": 1}, study.forecasts[2]) == pytest.approx(spare * 16 / 17)
    for refused in (["nodes=1"], ["nodes=4", "min_nodes=4"]):
        with pytest.raises(UsageError, match="--nnodes MIN:MAX"):
            choices(scenario_of([], 24.0, 8.0, 0.0, refused))


@pytest.mark.parametrize("wrong", [["nodes=0"], ["nodes=1.5"], ["nodes=2", "min_nodes=3"], ["spares=-1"]])
def test_nodes_are_counted(wrong: list[str]) -> None:
    with pytest.raises(UsageError, match=r"nodes|spares"):
        scenario_of([], 24.0, 8.0, 0.0, wrong)


def test_what_only_memory_held_is_lost_with_it() -> None:
    """After one failure the run resumes from memory and commits the snapshot; the next failure takes the node."""
    scenario = QUIET.with_(node_loss_share=0.5, detection_s=0.0, restart_s=0.0, restore_memory_s=0.0, node_wait_s=0.0)
    out = simulate(scenario, Kinds([0.9, 0.0]), iter([10 + 303.0, 50.0, 1e9]))
    assert out.interruptions == 2 and out.seconds["lost work"] == pytest.approx(50)


def test_backoff_without_a_new_checkpoint() -> None:
    """Five failures, none behind a checkpoint: no wait, 1 s, 2 s, 4 s, 8 s."""
    scenario = QUIET.with_(backoff_jitter_s=0.0, detection_s=0.0, restart_s=0.0, restore_memory_s=0.0)
    out = simulate(scenario, random.Random(0), iter([20.0, 5.0, 5.0, 5.0, 150.0, 1e9]))
    assert out.interruptions == 5 and out.seconds["backoff"] == 1 + 2 + 4 + 8
    # The snapshot in memory is then committed, which resets the count of failures.
    again = simulate(scenario, random.Random(0), iter([150.0, 5.0, 1e9]))
    assert again.interruptions == 2 and again.seconds["backoff"] == 0


def test_a_reclaim_loses_nothing() -> None:
    class Reclaims(random.Random):
        def expovariate(self, lambd: float = 1.0) -> float:
            return 350.0

    scenario = QUIET.with_(reclaim_s=350.0, stop_s=4.0, node_wait_s=30.0, restore_storage_s=6.0)
    out = simulate(scenario, Reclaims(0), iter([1e9]))
    assert out.seconds["lost work"] == 0 and out.seconds["teardown"] == 4 * out.interruptions
    assert out.seconds["training"] == pytest.approx(1000)


def test_agrees_with_young_and_daly() -> None:
    """Memoryless failures, snapshots only: the expected wall time has a closed form (Daly 2006, eq. 13)."""
    interval, stall, restart, mttf = 600.0, 20.0, 30.0, 5_000.0
    scenario = Scenario(
        work_s=3_000_000.0, mttf_s=mttf, detection_s=0.0, restart_s=restart, restore_memory_s=0.0, first_start_s=0.0,
        first_snapshot_s=interval, snapshot_interval_s=interval, snapshot_s=0.0, snapshot_stall_s=stall, hang_share=0.0,
        node_loss_share=0.0, backoff_initial_s=0.0, backoff_jitter_s=0.0,
    )  # fmt: skip
    expected = mttf * math.exp(restart / mttf) * (math.exp((interval + stall) / mttf) - 1) / interval
    seen = forecast(scenario, runs=40)
    assert 1 / seen.goodput == pytest.approx(expected, rel=0.01)
    # Their interval is the best one.
    best = math.sqrt(2 * stall * mttf) - stall
    at_best = forecast(scenario.with_(snapshot_interval_s=best), runs=40).goodput
    for factor in (0.3, 3.0):
        assert forecast(scenario.with_(snapshot_interval_s=best * factor), runs=40).goodput < at_best


def test_where_checkpoints_fall() -> None:
    """Back at 250 s of work from memory: the next commit is at 300 s, and not 100 s later."""
    scenario = QUIET.with_(
        snapshot_interval_s=50.0, commit_interval_s=100.0, commit_s=0.0, snapshot_stall_s=0.0, detection_s=0.0,
        restart_s=0.0, restore_memory_s=0.0, node_wait_s=0.0, restore_storage_s=0.0, backoff_initial_s=0.0,
        backoff_jitter_s=0.0, node_loss_share=0.5, first_snapshot_s=50.0,
    )  # fmt: skip

    out = simulate(scenario, Kinds([0.9, 0.1]), iter([10 + 260.0, 70.0, 1e9]))
    assert out.interruptions == 2 and out.seconds["lost work"] == pytest.approx(10 + 20)


def test_the_first_snapshot_counts_as_progress() -> None:
    """Failures soon after each start: with the snapshot that tells the price, each has something new."""
    scenario = QUIET.with_(backoff_jitter_s=0.0, detection_s=0.0, restart_s=0.0, restore_memory_s=0.0)
    gaps = [20.0, 5.0, 5.0, 5.0, 150.0, 1e9]
    assert simulate(scenario.with_(first_snapshot_s=2.0), random.Random(0), iter(gaps)).seconds["backoff"] == 0
    assert simulate(scenario.with_(first_snapshot_s=7.0), random.Random(0), iter(gaps)).seconds["backoff"] == 1 + 2 + 4


shares = st.floats(0, 0.5)
times = st.floats(0, 500)


@given(
    shares, shares, times, times, times, times, times, st.floats(1, 2000), st.floats(0, 50), st.floats(1, 4000), times,
    st.floats(0, 0.9), st.floats(200, 1e5), st.integers(0, 1000),
)  # fmt: skip
def test_time_adds_up_and_work_is_done_once(
    hang: float, machine: float, detection: float, restart: float, restore: float, storage: float, wait: float,
    snapshot: float, stall: float, commit: float, commit_s: float, overhead: float, mttf: float, seed: int,
) -> None:  # fmt: skip
    scenario = Scenario(
        work_s=5000.0, mttf_s=mttf, reclaim_s=4 * mttf, hang_share=hang, node_loss_share=machine, detection_s=detection,
        restart_s=restart, restore_memory_s=restore, restore_storage_s=storage, node_wait_s=wait,
        snapshot_interval_s=snapshot, snapshot_stall_s=stall, commit_interval_s=commit, commit_s=commit_s,
        overhead_share=overhead,
    )  # fmt: skip
    out = simulate(scenario, random.Random(seed))
    assert all(seconds >= -1e-6 for seconds in out.seconds.values())
    done = out.seconds["training"]
    assert done == pytest.approx(5000, rel=1e-6) if out.finished else done <= 5000 * (1 + 1e-6)
    assert 0 <= out.goodput <= 1


def test_learnt_cadence() -> None:
    """A snapshot after 1 s, then every 4 s; every second one is committed, one of them after the attempt's end."""
    events: list[dict[str, Any]] = [{"event": "run_started", "time": 0.0, "attempt": 0}]
    for attempt, begin in ((1, 10.0), (2, 40.0)):
        events.append({"event": "attempt_started", "time": begin, "attempt": attempt})
        events.append({"event": "training_started", "time": begin + 2, "attempt": attempt, "step": 0})
        for number in range(6):
            step, at = number + 10 * attempt, begin + 3 + 4 * number
            events.append({"event": "log", "time": at - 0.25, "attempt": attempt, "step": step, "loss": 1.0})
            snapshot = {"event": "snapshot", "time": at, "attempt": attempt, "step": step}
            events.append({**snapshot, "to_be_committed": number % 2 == 1})
            if number == 4:
                # Its ranks have died, and it is the newest.
                events.append({"event": "committed", "time": at + 1, "attempt": attempt, "step": step, "duration_s": 1})
            if number % 2:
                late = 30.0 if number == 5 else 0.5
                events.append(
                    {"event": "committed", "time": at + late, "attempt": attempt, "step": step, "duration_s": 1}
                )
        events.append({"event": "log", "time": begin + 25, "attempt": attempt, "step": 10 * attempt + 6, "loss": 1.0})
        events.append(
            {
                "event": "attempt_ended",
                "time": begin + 26,
                "attempt": attempt,
                "kind": "crashed",
                "cause": "why",
                "start_step": 10 * attempt,
                "step": 10 * attempt + 6,
            }
        )
    learnt = learn(entries(events), Scenario(work_s=100.0, mttf_s=math.inf))
    assert (learnt.first_snapshot_s, learnt.snapshot_interval_s, learnt.commit_interval_s) == (1.0, 4.0, 8.0)
    assert learnt.snapshot_s == 0.25
    # What a disk has damaged is passed over.
    damaged: list[dict[str, Any]] = [
        {"event": name, "time": 60.0, "attempt": 1, "step": [1]} for name in ("log", "committed")
    ]
    assert learn(entries([*events, *damaged]), Scenario(work_s=100.0, mttf_s=math.inf)) == learnt


def test_same_seed_same_answer() -> None:
    scenario = QUIET.with_(mttf_s=300.0)
    assert forecast(scenario, 20, seed=7) == forecast(scenario, 20, seed=7) != forecast(scenario, 20, seed=8)


def test_a_trace_goes_round(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text("# hours\n0.1\n\n0.05\n")
    trace = read_trace(file)
    assert trace == [360.0, 180.0]
    seen = forecast(QUIET.with_(detection_s=0.0), 10, trace_s=trace)
    assert 3 <= seen.interruptions <= 6
    for text, word in (("", "empty"), ("x\n", "line 1: 'x' is not a number"), ("1\n-1\n", "line 2: '-1'")):
        file.write_text(text)
        with pytest.raises(UsageError, match=word):
            read_trace(file)
    with pytest.raises(UsageError, match="nowhere"):
        read_trace(tmp_path / "nowhere")


def test_a_run_that_never_ends_is_told_so() -> None:
    hopeless = QUIET.with_(mttf_s=5.0, restart_s=60.0)
    assert forecast(hopeless, 2).finished == 0


def test_learnt_from_a_journal() -> None:
    """The ledger's test run: a hang after 50 steps in 10 s, found after 3 s and torn down in 1 s."""
    learnt = learn(entries(EVENTS), Scenario(work_s=100.0, mttf_s=math.inf))
    assert learnt.first_start_s == pytest.approx(109 - 100 - 1) and learnt.hang_detection_s == pytest.approx(123 - 119)
    assert learnt.restart_s == pytest.approx(129 - 123 - 3 - 1) and learnt.restore_memory_s == 1.0
    assert learnt.snapshot_stall_s == 0.5 and learnt.node_wait_s == pytest.approx(20)
    assert learnt.detection_s == Scenario(work_s=1.0, mttf_s=1.0).detection_s, "no crash in it"


def test_learnt_within_one_life() -> None:
    """Two lives, ten hours apart: that is no restart, and no first start."""
    later = [{**one, "time": one["time"] + 36_000} for one in EVENTS]
    for one in later:
        one["attempt"] += 3 if one["attempt"] else 0
    learnt = learn(entries([*EVENTS, *later]), Scenario(work_s=100.0, mttf_s=math.inf))
    assert learnt.restart_s == pytest.approx(129 - 123 - 3 - 1) and learnt.first_start_s == pytest.approx(8)


def test_commits_are_as_frequent_as_was_said() -> None:
    """Not rounded to snapshots' intervals; and one is written at a time."""

    def lost(**changes: float) -> float:
        scenario = QUIET.with_(node_loss_share=1.0, mttf_s=2_000.0, commit_s=1.0, work_s=200_000.0, **changes)
        return forecast(scenario, 20).seconds["lost work"]

    assert lost(commit_interval_s=10.0) < 0.5 * lost(commit_interval_s=100.0)
    assert lost(commit_interval_s=100.0) < lost(commit_interval_s=150.0) < lost(commit_interval_s=300.0)
    scenario = QUIET.with_(node_loss_share=1.0, mttf_s=2_000.0, work_s=200_000.0, commit_interval_s=100.0)
    slow = forecast(scenario.with_(commit_s=1_000.0), 20).seconds["lost work"]
    assert slow > 5 * lost(commit_interval_s=100.0)


@pytest.mark.parametrize("value", ["inf", "nan", "-1", "x"])
def test_what_is_no_time_is_refused(value: str) -> None:
    for name in ("work_s", "snapshot_interval_s", "restart_s"):
        with pytest.raises(UsageError):
            scenario_of([], 1.0, 1.0, 0.0, [f"{name}={value}"])
    assert scenario_of([], 1.0, 1.0, 0.0, ["node_loss_share=1", "hang_share=0"]).node_loss_share == 1


def test_without_failures_it_is_json() -> None:
    told = json.dumps(Study(scenario_of([], 1.0, None, 0.0, []), [{}], 2, 0).to_dict(None), allow_nan=False)
    assert json.loads(told)["scenario"]["mttf_s"] is None


def test_failures_without_end() -> None:
    assert simulate(QUIET.with_(detection_s=0.0), random.Random(0), itertools.repeat(1e-7)).finished is False


def test_study(tmp_path: Path) -> None:
    scenario = scenario_of([], 2.0, 1.0, 0.0, ["restart_s=5", "node_loss_share=0"])
    assert scenario.restart_s == 5 and scenario.work_s == 2 * HOUR_S
    changes = variations(["commit_interval_s=60,600", "restart_s=1,300"], scenario)
    assert len(changes) == 4 and changes[0] == {"commit_interval_s": 60.0, "restart_s": 1.0}
    study = Study(scenario, changes, 20, 0)
    told = json.loads(json.dumps(study.to_dict(0.9)))
    assert [one["changes"] for one in told["forecasts"]] == changes
    assert told["forecasts"][0]["reaches_target"] and not told["forecasts"][1]["reaches_target"]
    page = to_page(study)
    assert "restart_s=300" in page and page.count('class="interval"') == page.count("<li>") == 2 and len(page) < 50_000
    for wrong in (["nothing=1"], ["restart_s=x"], ["restart_s=-1"], ["hang_share=2"], [f"restart_s={'1,' * 300}1"]):
        with pytest.raises(UsageError):
            variations(wrong, scenario)
    with pytest.raises(UsageError, match="unknown; did you mean restart_s"):
        scenario_of([], 1.0, 1.0, 0.0, ["restart=5"])


def test_lost_nodes_come_back_one_by_one() -> None:
    nodes = Nodes(FOUR)
    assert nodes.growth_in == math.inf and nodes.share == 1
    assert nodes.lose() == 0 and nodes.share == 0.75 and nodes.growth_in == 100
    nodes.elapse(60)
    assert nodes.lose() == 0 and nodes.active == 2 and nodes.growth_in == 40
    # A third one is too many: the run waits for the first replacement.
    assert nodes.lose() == 40 and nodes.active == 2 and nodes.growth_in == 60
    nodes.elapse(100)
    assert nodes.spares == 2 and nodes.growth_in == 0
    nodes.grow()
    assert nodes.active == 4 and nodes.growth_in == math.inf


def test_no_node_is_admitted_sooner_than_the_interval_allows() -> None:
    nodes = Nodes(FOUR.with_(node_wait_s=10.0))
    nodes.lose()
    assert nodes.growth_in == 30


def test_a_spare_replaces_a_lost_node_and_is_replaced_itself() -> None:
    nodes = Nodes(FOUR.with_(spares=1, min_nodes=4))
    assert nodes.lose() == 0 and (nodes.active, nodes.spares) == (4, 0)
    assert nodes.lose() == 100 and (nodes.active, nodes.spares) == (4, 1)
