"""Who leads when a node starts, with real files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.node_fakes import FakeSession

from checkpointing.storage.sidecars import LocalSidecars
from runner.config.schema import Config
from runner.journal.run_directory import RunDirectory
from runner.lease.leadership import LeaderChoice, take_over
from runner.lease.lease import LeaseRecord, newest_lease, take


def node(folder: Path, rank: int, *, nodes: str = "1:3", forced: bool = False) -> LeaderChoice:
    config = Config.model_validate(
        {
            "output_dir": str(folder / f"node-{rank}"),
            "checkpoint": {"location": str(folder / "volume")},
            "launch": {"nnodes": nodes, "node_rank": rank, "rdzv_endpoint": "node0:29500"},
        }
    )
    directory = RunDirectory(config.output_dir, rank)
    directory.create()
    return LeaderChoice(config, directory, forced=forced)


def sidecars(folder: Path) -> LocalSidecars:
    return LocalSidecars(folder / "volume", may_create=lambda: True)


def test_the_first_node_begins_a_run_and_the_others_follow(tmp_path: Path) -> None:
    first, second = node(tmp_path, 0), node(tmp_path, 1)
    assert (first.leads, second.leads) == (True, False)
    assert not (tmp_path / "volume").exists(), "nothing is written before all checks have passed"
    keeper = first.take()
    assert keeper is not None and keeper.lease.host == "node0" and keeper.lease.epoch == 1
    assert second.take() is None and second.watch() is not None


def test_where_all_nodes_are_needed_nobody_takes_a_lease(tmp_path: Path) -> None:
    first, second = node(tmp_path, 0, nodes="3"), node(tmp_path, 1, nodes="3")
    assert (first.leads, first.take(), first.watch(), second.leads) == (True, None, None, False)


def test_a_first_node_that_comes_back_follows_the_one_that_leads_now(tmp_path: Path) -> None:
    take(sidecars(tmp_path), LeaseRecord(4, "another", node_rank=2))
    assert not node(tmp_path, 0).leads
    # Not if it was asked to start over, or from a certain step.
    forced = node(tmp_path, 0, forced=True)
    assert forced.leads and not node(tmp_path, 1, forced=True).leads
    keeper = forced.take()
    assert keeper is not None and keeper.lease.epoch == 5


def test_a_leader_that_was_killed_and_is_back_leads_under_the_name_that_the_others_know(tmp_path: Path) -> None:
    second = node(tmp_path, 1)
    own = second._directory.run_id()
    take(sidecars(tmp_path), LeaseRecord(4, own, node_rank=1, host="10.0.0.2", run_id="of-the-first-leader"))
    again = node(tmp_path, 1)
    keeper = again.take()
    assert again.leads and keeper is not None
    assert (keeper.lease.epoch, keeper.lease.run_id, keeper.lease.host) == (5, "of-the-first-leader", "10.0.0.2")


def test_of_two_that_begin_at_once_one_follows(tmp_path: Path) -> None:
    first = node(tmp_path, 0)
    take(sidecars(tmp_path), LeaseRecord(1, "another"))
    assert first.leads and first.take() is None and not first.leads


def test_a_storage_that_does_not_decide_leaves_the_lead_with_the_first_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalSidecars, "decides", False)
    first, second = node(tmp_path, 0), node(tmp_path, 1)
    assert (first.leads, first.take(), second.watch()) == (True, None, None)
    assert "does not decide" in (first.caveat or "")


def test_a_storage_that_is_away_lets_the_first_node_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> dict[str, int]:
        raise OSError("no route to host")

    monkeypatch.setattr(LocalSidecars, "sizes", refuse)
    first, second = node(tmp_path, 0), node(tmp_path, 1)
    assert (first.leads, first.take()) == (True, None)
    assert not second.leads and second.watch() is not None


def test_taking_over_is_shown(tmp_path: Path) -> None:
    session, lease = FakeSession(tmp_path), LeaseRecord(2, "b", "b1", 1, "10.0.0.2", "run")
    assert take_over(session, lease).lease == lease
    display: Any = session.display
    assert display.texts == ["the leader is gone: node 1 leads this run now, at 10.0.0.2"]
    assert newest_lease(session.config.tiers.durable.sidecars) is None, "it was taken before"
