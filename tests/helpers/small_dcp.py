"""Small checkpoints of `torch.distributed.checkpoint`, committed by us, and their faults."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import staging, state_dict_loader, state_dict_saver

from checkpointing.agent.events import StepEvent
from checkpointing.dcp import protect
from checkpointing.dcp.folders import METADATA, CheckpointFolder, LocalFolder, ObjectFolder
from checkpointing.host.environment import SETTINGS_ENV, RankSettings

# Not exported explicitly, for mypy.
dcp: Any = importlib.import_module("torch.distributed.checkpoint")
Reports = list[StepEvent]


def commit_and_verify(monkeypatch: pytest.MonkeyPatch) -> Reports:
    """Protect saves and loads until the test ends; return what will be reported."""
    for owner, name in (
        (state_dict_saver, "_save_state_dict"),
        (state_dict_loader, "_load_state_dict"),
        (state_dict_saver, "_ThreadBasedAsyncCheckpointExecutor"),
        (state_dict_saver, "_ProcessBasedAsyncCheckpointExecutor"),
        (staging.DefaultStager, "stage"),
        (staging.BlockingAsyncStager, "stage"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    reports: Reports = []
    protect(reports.append)  # type: ignore[arg-type]
    return reports


def environment_of(monkeypatch: pytest.MonkeyPatch, attempt: int, run_id: str = "run") -> None:
    """Have this process be a rank of an attempt of a runner."""
    monkeypatch.setitem(os.environ, SETTINGS_ENV, RankSettings(attempt=attempt, lineage=run_id).to_json())


def spoil(folder: CheckpointFolder, damage: str) -> None:
    """Damage a checkpoint behind the library's back."""
    name = {"index": METADATA}.get(damage) or next(
        one for one in folder.sizes() if one.endswith("manifest.json" if "manifest" in damage else ".distcp")
    )
    data = bytearray(folder.read(name) or b"")
    if damage == "truncated":
        del data[-1:]
    elif damage != "missing":
        data[len(data) // 2] ^= 0x40
    is_gone = damage in ("missing", "no manifest")
    if isinstance(folder, LocalFolder):
        path = Path(folder.where) / name
        path.unlink() if is_gone else path.write_bytes(data)
        return
    assert isinstance(folder, ObjectFolder)
    key = f"{folder.name}/{name}"
    folder._store.delete([key]) if is_gone else folder._store.put(key, bytes(data))
