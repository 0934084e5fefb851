"""Files of a checkpoint that somebody has replaced by a pickle that runs code, with digests that are right."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pickle
from pathlib import Path

import pytest
import torch
from helpers.bomb import Bomb
from helpers.small_checkpoint import point
from helpers.small_dcp import commit_and_verify, dcp

from checkpointing.dcp.folders import METADATA
from checkpointing.errors import CheckpointError, InvalidCheckpoint
from checkpointing.format.digest import algorithm_of, digest_buffer
from checkpointing.format.layout import OPTIMIZER_NAME
from checkpointing.format.manifest import Manifest
from checkpointing.process import rng

NAMES = (OPTIMIZER_NAME, rng.file_name(0, 1), "scheduler.pt", "script_state_0.pt")


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_a_torch_file_runs_no_code(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for data in (saved(Bomb(marker)), saved({"state": {0: Bomb(marker)}}), pickle.dumps(Bomb(marker))):
        with pytest.raises(InvalidCheckpoint, match="cannot be parsed"):
            point(name, data).torch_object(name)
    assert not marker.exists()
    # The bomb works.
    torch.load(io.BytesIO(saved(Bomb(marker))), weights_only=False)
    assert marker.exists()


@pytest.fixture
def dcp_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that `torch.distributed.checkpoint` has saved, and we have committed."""
    commit_and_verify(monkeypatch)
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=str(tmp_path / "step-7"))
    return tmp_path / "step-7"


def replace_index(folder: Path, data: bytes) -> None:
    """Replace torch's index, and its digest and size in the manifest."""
    (path,) = folder.glob("*/manifest.json")
    manifest = Manifest.from_json(path.read_bytes(), "")
    files = tuple(
        dataclasses.replace(file, size=len(data), digest=digest_buffer(data, algorithm_of(file.digest)))
        if file.name == METADATA
        else file
        for file in manifest.files
    )
    path.write_bytes(dataclasses.replace(manifest, files=files).to_json())
    (folder / METADATA).write_bytes(data)


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_the_index_of_torchs_distributed_checkpoints_runs_no_code(dcp_folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    replace_index(dcp_folder, pickle.dumps(Bomb(marker)))
    with pytest.raises((CheckpointError, dcp.CheckpointException)):
        dcp.load({"weight": torch.zeros(3)}, checkpoint_id=str(dcp_folder))
    assert not marker.exists(), marker.read_text()


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_an_index_that_was_replaced_without_its_digest_is_not_read(dcp_folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (dcp_folder / METADATA).write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises((CheckpointError, dcp.CheckpointException), match="was altered"):
        dcp.load({"weight": torch.zeros(3)}, checkpoint_id=str(dcp_folder))
    assert not marker.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_a_value_in_torchs_distributed_checkpoints_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, place = tmp_path / "ran", str(tmp_path / "step-7")
    commit_and_verify(monkeypatch)
    dcp.save({"weight": torch.ones(3), "step": Bomb(marker)}, checkpoint_id=place)
    with contextlib.suppress(CheckpointError, dcp.CheckpointException):
        dcp.load({"weight": torch.zeros(3), "step": 0}, checkpoint_id=place)
    assert not marker.exists(), marker.read_text()
