"""Commits without memory for a snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_checkpoint import Agent, images, network

from checkpointing.commit.catalog import verify
from checkpointing.commit.retention import Retention
from checkpointing.commit.tiers import open_tiers
from checkpointing.errors import CommitFailed
from checkpointing.files.file_images import Extent
from checkpointing.process.device import HostDevice
from checkpointing.snapshot import direct_commit
from checkpointing.snapshot.direct_commit import DirectCommit
from checkpointing.snapshot.request import SnapshotRequest

REQUEST = SnapshotRequest(30, 240, {}, {}, Retention(1), {"eval_loss": 2.0}, wait=False, commit=True)


def test_a_checkpoint_is_written_announced_and_older_ones_are_pruned(tmp_path: Path) -> None:
    agent: Any = Agent(tmp_path)
    direct = DirectCommit(agent, open_tiers(str(tmp_path / "run")), 2)
    direct.commit(REQUEST, images(*network()), HostDevice())
    manifest = open_tiers(str(tmp_path / "run")).durable.read_manifest(30)
    verify(open_tiers(str(tmp_path / "run")).durable, 30)
    assert (manifest.info.world_size, manifest.info.samples_consumed, manifest.info.attempt) == (2, 240, 2)
    assert direct.error is None and agent.pruned == 1
    (event,) = agent.events
    assert (event["event"], event["step"], event["nbytes"]) == ("committed", 30, manifest.total_bytes)


def test_a_refusal_is_kept_until_a_commit_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise CommitFailed("disk full")

    agent: Any = Agent(tmp_path)
    direct = DirectCommit(agent, open_tiers(str(tmp_path / "run")), 1)
    monkeypatch.setattr(direct_commit, "commit_snapshot", refuse)
    direct.commit(REQUEST, images(*network()), HostDevice())
    assert direct.error == "disk full" and agent.pruned == 0
    assert [(event["event"], event["error"]) for event in agent.events] == [("commit_failed", "disk full")]
    monkeypatch.undo()
    direct.commit(REQUEST, images(*network()), HostDevice())
    assert direct.error is None


def test_sharded_state_is_refused(tmp_path: Path) -> None:
    agent: Any = Agent(tmp_path)
    direct = DirectCommit(agent, open_tiers(str(tmp_path / "run")), 2)
    files = images(*network())
    files[0].own.append(Extent(0, torch.zeros(1, dtype=torch.uint8)))
    direct.commit(REQUEST, files, HostDevice())
    assert direct.error is not None and "set a larger checkpoint.memory_limit" in direct.error
