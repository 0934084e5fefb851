"""What is known of the nodes of a run: from their journals, the lease and exit codes, with made-up ones."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.commit.tiers import open_tiers
from runner.chaos.cluster import Cluster
from runner.chaos.run_under_test import JobUnderTest
from runner.lease.lease import LeaseRecord, take


@pytest.fixture
def cluster(tmp_path: Path) -> Any:
    tiers = open_tiers(str(tmp_path / "volume"), None)
    made = Cluster(tmp_path, JobUnderTest().with_settings(f"checkpoint.location={tmp_path}/volume"), tiers, 3, None)
    yield made
    for node in made.nodes:
        node.run.close()


def ends(node: Any, code: int | None) -> None:
    """The node's runner was started, and runs if there is no code."""
    node._started = True
    node.run.process = SimpleNamespace(poll=lambda: code, wait=lambda *_: code, pid=2**22 + 1)


def record(folder: Path, *events: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "journal.jsonl").write_text("".join(json.dumps({"attempt": 1, **event}) + "\n" for event in events))


def add(folder: Path, event: dict[str, Any]) -> None:
    with (folder / "journal.jsonl").open("a") as file:
        file.write(json.dumps({"attempt": 1, **event}) + "\n")


def test_a_node_has_an_address_and_a_disk_of_its_own(cluster: Cluster) -> None:
    second = cluster.nodes[1].run.command
    assert second[second.index("--node-rank") + 1] == "1" and "127.0.0.2" in second
    assert "launch.peer_bind=127.0.0.2" in second and second[second.index("--nnodes") + 1] == "1:3"


def test_who_runs_and_who_leads(cluster: Cluster) -> None:
    assert cluster.alive == [] and cluster.leader is None and not cluster.has_finished
    for node in cluster.nodes:
        ends(node, None)
    take(cluster.tiers.durable.sidecars, LeaseRecord(1, "x", node_rank=2))
    assert cluster.leader is cluster.nodes[2]
    ends(cluster.nodes[2], -9)
    assert cluster.leader is None and [node.rank for node in cluster.absent] == [2]
    ends(cluster.nodes[0], 0)
    assert cluster.has_finished


def test_what_the_leaders_recorded_is_one_history(cluster: Cluster, tmp_path: Path) -> None:
    started = {"event": "run_started", "run_id": "a"}
    record(
        tmp_path / "machine-0", {"time": 1, **started}, {"time": 3, "event": "committed", "step": 20, "tier": "local"}
    )
    followed = {"time": 1, **started, "leads": False}
    record(
        tmp_path / "machine-1" / "node-1",
        followed,
        {"time": 2, "event": "log", "step": 99, "loss": 1.0},
        {"time": 4, **started},
        {"time": 5, "event": "log", "step": 25, "loss": 1.0},
    )
    assert [entry.time for entry in cluster.entries()] == [1, 3, 4, 5]
    assert (cluster.step(), cluster.acknowledged()) == (25, 20)
    # A machine that is replaced takes its disk with it, not what is known of it.
    cluster._past += cluster.nodes[0].entries()
    cluster.nodes[0].replace()
    assert not (tmp_path / "machine-0").exists() and cluster.acknowledged() == 20


def test_an_end_that_no_fault_explains_is_named(cluster: Cluster) -> None:
    for node, code in zip(cluster.nodes, (75, -9, 2), strict=True):
        ends(node, code)
    (text,) = cluster.unexpected_ends()
    assert text.startswith("node 2 ended with 2")
    assert not cluster.wait_for_step(10.0)


def test_nodes_that_have_all_ended_are_started_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in cluster.nodes:
        ends(node, 75)
    monkeypatch.setattr("runner.chaos.cluster.time.sleep", lambda seconds: None)

    def start(nodes: list[Any]) -> None:
        for node in nodes:
            ends(node, 0)

    monkeypatch.setattr(cluster, "start", start)
    assert cluster.wait_for_step(10.0) and cluster.finish(10.0)


def test_a_machine_that_lost_power_has_not_finished(cluster: Cluster) -> None:
    """Its runner may be reaped with the rest, and then Popen takes its status for 0."""
    node = cluster.nodes[0]
    node.run.command = ["sleep", "60"]
    node.start()
    node.kill()
    assert node.exit_code == -signal.SIGKILL and not cluster.has_finished
    node.run.command = ["true"]
    node.start()
    node.run.process.wait()
    node.kill()
    assert node.exit_code == 0


def test_a_step_is_new_if_it_was_logged_since_whatever_its_time(cluster: Cluster, tmp_path: Path) -> None:
    """A clock that had jumped left a step of the future, which every later wait took for progress."""
    ends(cluster.nodes[0], None)
    started: dict[str, Any] = {"time": 1, "event": "run_started", "run_id": "a"}
    logged: dict[str, Any] = {"event": "log", "step": 20, "loss": 1.0}
    record(tmp_path / "machine-0", started, {"time": time.time() + 3600, **logged})
    assert not cluster.wait_for_step(0.2)
    timer = threading.Timer(0.3, lambda: add(tmp_path / "machine-0", {"time": 2, **logged, "step": 25}))
    timer.start()
    assert cluster.wait_for_step(60)
    timer.join()
