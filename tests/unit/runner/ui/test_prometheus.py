from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from helpers.journals import event
from prometheus_client.core import Metric

from checkpointing.agent.events import SlowRanks
from runner.errors import UsageError
from runner.journal.journal import Journal
from runner.journal.ledger import AttemptAccount, NodeChange
from runner.journal.summary import RunState, RunSummary
from runner.ui.prometheus import RunCollector, metrics, serve

MONITORING = Path(__file__).parents[4] / "deploy" / "monitoring"


def families(run: RunSummary, now: float = 0.0) -> dict[str, Metric]:
    return {family.name: family for family in metrics(run, now)}


def values(run: RunSummary) -> dict[str, float]:
    return {sample.name: sample.value for family in metrics(run, 0.0) for sample in family.samples}


def test_what_is_not_known_is_absent() -> None:
    found = families(RunSummary(run_id="r"))
    assert "runner_loss" not in found and "runner_total_steps" not in found and "runner_restarts_left" not in found
    assert found["runner_step"].samples[0].value == 0
    assert found["runner_checkpoint_step"].samples == []


def test_a_run_of_several_nodes_says_how_many_it_has() -> None:
    changes = [NodeChange(2, 9, [], [1], pause_s=2.0, lost_steps=1), NodeChange(3, 29, [1], [], 1.5, 0)]
    found = values(RunSummary(nodes=[0, 2], max_nodes=3, node_changes=changes))
    assert (found["runner_nodes"], found["runner_max_nodes"]) == (2, 3)
    assert (found["runner_node_changes_total"], found["runner_node_change_seconds_total"]) == (2, 3.5)
    assert "runner_nodes" not in values(RunSummary())


def test_slow_ranks_are_there_while_the_run_is_running() -> None:
    slow = SlowRanks(ranks=[3, 5], ratios=[1.5, 2.0], nodes=[1, 2])
    samples = families(RunSummary(slow=slow, state=RunState.RUNNING))["runner_slow_rank_ratio"].samples
    assert [(sample.labels, sample.value) for sample in samples] == [
        ({"rank": "3", "node": "1"}, 1.5),
        ({"rank": "5", "node": "2"}, 2.0),
    ]
    assert families(RunSummary(slow=slow, state=RunState.BACKOFF))["runner_slow_rank_ratio"].samples == []


def test_one_state_is_current() -> None:
    samples = families(RunSummary(state=RunState.RUNNING))["runner_state"].samples
    assert [sample.labels["state"] for sample in samples if sample.value == 1] == ["running"]
    assert len(samples) > 1


def test_the_age_of_a_checkpoint_is_never_negative() -> None:
    run = RunSummary(newest_by_tier={"local": 7}, newest_at_by_tier={"local": 100.0})
    for now, age in ((130.0, 30.0), (90.0, 0.0)):
        (sample,) = families(run, now)["runner_checkpoint_age_seconds"].samples
        assert (sample.labels, sample.value) == ({"tier": "local"}, age)


def test_a_journal_is_read_once_per_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, lambda: 1.0)
    collector = RunCollector(path, clock=lambda: 1.0)
    monotonic = [0.0]
    monkeypatch.setattr("runner.ui.prometheus.time.monotonic", lambda: monotonic[0])

    def run_id() -> str:
        (family,) = (family for family in collector.collect() if family.name == "runner_run")
        return str(family.samples[0].labels["run_id"])

    assert run_id() == ""
    journal.append(event("run_started", run_id="first", committed_step=-1), 0)
    assert run_id() == ""
    monotonic[0] = 61.0
    assert run_id() == "first"


def test_alerts_and_dashboard_ask_for_metrics_that_exist() -> None:
    known = RunSummary(total_steps=1, last_loss=1.0, tokens_per_s=1.0, restarts_left=1, nodes=[0], max_nodes=1)
    suffixes = {"counter": "_total", "info": "_info"}
    exported = {family.name + suffixes.get(family.type, "") for family in metrics(known, 0.0)}
    text = (MONITORING / "alerts.yaml").read_text() + (MONITORING / "grafana-dashboard.json").read_text()
    assert set(re.findall(r"\brunner_[a-z_]+", text)) <= exported


def test_failures_are_counted_by_class() -> None:
    attempts = [
        AttemptAccount(number=number, began=0.0, kind=kind)
        for number, kind in enumerate(("crashed", "hung", "crashed", "finished"))
    ]
    samples = families(RunSummary(attempts=attempts))["runner_restarts"].samples
    found = {sample.labels["cause"]: sample.value for sample in samples if sample.name.endswith("_total")}
    assert found["crashed"] == 2 and found["hung"] == 1 and "finished" not in found


def test_a_port_that_is_taken_is_a_users_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"--metrics-port {port} cannot be used: .*; choose another port"):
            serve("127.0.0.1", port, RunCollector(tmp_path / "journal.jsonl"))
