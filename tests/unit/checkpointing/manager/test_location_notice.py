"""The notice that checkpoints are kept elsewhere than the script says."""

from __future__ import annotations

from pathlib import Path

from checkpointing.commit.protocol import StagedFile, commit_snapshot
from checkpointing.format.digest import RunningDigest, digesting
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.manager.node_services import location_notice
from checkpointing.storage import LocalStorage


def test_nothing_is_said_where_the_scripts_own_location_is_used(tmp_path: Path) -> None:
    assert location_notice(str(tmp_path), str(tmp_path / "x" / "..")) is not None
    assert location_notice(str(tmp_path), str(tmp_path)) is None
    assert location_notice(str(tmp_path), "") is None


def test_how_to_resume_without_the_supervisor_is_said(tmp_path: Path) -> None:
    notice = location_notice("/run", str(tmp_path / "none"))
    assert notice is not None and "CHECKPOINT_LOCATION=/run plain torchrun" in notice and "step" not in notice


def test_checkpoints_that_are_left_aside_are_named(tmp_path: Path) -> None:
    info = SnapshotInfo("run", 1, 30, 1, 30, {})
    digest = RunningDigest()
    files = [
        StagedFile(name, digesting(iter([memoryview(b"data")]), digest), digest.result)
        for name in ("model.safetensors", "optimizer.pt")
    ]
    commit_snapshot(LocalStorage(tmp_path), info, files)
    notice = location_notice("/run", str(tmp_path))
    assert notice is not None and f"{tmp_path} holds checkpoints up to step 30" in notice
