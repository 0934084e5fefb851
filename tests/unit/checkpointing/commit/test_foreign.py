"""Foreign and damaged files next to the checkpoints."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.command_line import run_command

from checkpointing import CheckpointManager
from checkpointing.commit.catalog import Catalog
from checkpointing.errors import CheckpointError, CommitFailed, InvalidCheckpoint
from checkpointing.format.manifest import Manifest
from checkpointing.storage import LocalStorage, open_storage
from checkpointing.storage.fence import Fence


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"3",
        b"\xff",
        b"[" * 3000,
        b'{"attempt": 1}',
        b'{"attempt": 1e999, "accepted": [], "writer": ""}',  # OverflowError, once
        b'{"attempt": 1, "accepted": [[1e999, 1]], "writer": ""}',
        b'{"attempt": "2", "accepted": [], "writer": ""}',
        b'{"attempt": 1.5, "accepted": [], "writer": ""}',
        b'{"attempt": -1, "accepted": [], "writer": ""}',
        b'{"attempt": 9223372036854775808, "accepted": [], "writer": ""}',
        b'{"attempt": 1, "accepted": [[1, 2, 3]], "writer": ""}',
    ],
)
def test_a_damaged_fence_is_reported_with_its_name_and_the_fix(damaged: bytes, tmp_path: Path) -> None:
    (tmp_path / ".fence.json").write_bytes(damaged)
    with pytest.raises(OSError, match=r"\.fence\.json: .*; remove it if no run writes here"):
        LocalStorage(tmp_path).fence()


@pytest.mark.parametrize(
    "damaged",
    [b"", b"[]", b"\xff", b"[" * 3000, b'{"attempt": 1e999}', b'{"attempt": "x"}', b'{"attempt": 1e30}', b"{}"],
)
def test_a_damaged_restart_state_is_replaced_by_the_next(damaged: bytes, tmp_path: Path) -> None:
    storage, note = LocalStorage(tmp_path), json.dumps({"attempt": 3}).encode()
    storage.sidecars.write_restart_state(damaged)
    storage.sidecars.replace_restart_state(note)
    assert storage.sidecars.read_restart_state() == note


@pytest.mark.parametrize("number", ["007", "٣", "²", "+5", "-1", "5 ", "5\n", "9" * 230])
def test_a_name_that_only_resembles_a_checkpoints_is_ignored(number: str, tmp_path: Path) -> None:
    """`checkpoint-007` was listed as step 7, which could not be quarantined: no attempt could resume any more."""
    storage = LocalStorage(tmp_path)
    (tmp_path / f"checkpoint-{number}").mkdir()
    assert storage.steps() == [] and storage.quarantined() == [] and storage.sweep() == []


@pytest.mark.parametrize("number", ["007", "٣", "9" * 230])
def test_a_foreign_object_is_neither_fence_nor_checkpoint(number: str) -> None:
    """`fence/007.json` was listed as fence 7, which did not exist: looking for it overflowed the stack."""
    storage = open_storage(f"memory://{uuid.uuid4().hex}/runs")
    assert storage.store is not None
    storage.store.put(f"fence/{number}.json", b"foreign")
    storage.store.put(f"checkpoint-{number}/manifest.json", b"foreign")
    assert storage.fence() == Fence() and storage.steps() == [] and storage.sweep() == []


def test_a_fence_that_is_listed_but_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(f"memory://{uuid.uuid4().hex}/runs")
    storage.begin_attempt(3)
    monkeypatch.setattr(storage.store, "get", lambda key: None)
    with pytest.raises(OSError, match=r"fence/3\.json is listed, but cannot be read"):
        storage.fence()


def stock_checkpoint(folder: Path, step: int) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    return checkpoint


def manager(folder: Path) -> CheckpointManager:
    model = torch.nn.Linear(2, 2)
    return CheckpointManager(
        str(folder), model=model, optimizer=torch.optim.SGD(model.parameters()), snapshot_steps=None
    )


def test_a_stock_trainers_checkpoints_are_left_alone(tmp_path: Path) -> None:
    """They were renamed to .invalid, and its own resumption found nothing any more."""
    theirs = stock_checkpoint(tmp_path, 20)
    mine = manager(tmp_path)
    assert mine.resume() == 0
    assert theirs.is_dir() and LocalStorage(tmp_path).quarantined() == []
    with pytest.raises(CheckpointError, match=r"checkpoint-20\): they are left as they are\. Start from one"):
        mine.restoring.check_way(0)
    mine.restoring.check_way(20)  # Training starts from this step.
    mine.save(20, 20)
    with pytest.raises(CommitFailed, match=r"checkpoint-20 was not written by this library and is kept"):
        mine.close()
    assert (theirs / "model.safetensors").read_bytes() == b"weights"
    agent = mine._node.connection._own_agent
    assert agent is not None and agent.process.poll() is not None  # nothing is left running


def test_a_folder_that_was_moved_away_is_not_created_again_for_a_note(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "checkpoints")
    storage.probe()
    storage.begin_attempt(1)
    storage.sidecars.write_restart_state(b"{}")
    (tmp_path / "checkpoints").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError):
        storage.sidecars.replace_restart_state(b"{}")
    with pytest.raises(FileNotFoundError):
        storage.sidecars.write("events", b"x")
    assert not (tmp_path / "checkpoints").exists()


def test_ours_that_has_lost_its_manifest_is_damaged_not_foreign(tmp_path: Path) -> None:
    (stock_checkpoint(tmp_path, 20) / "loop_state_0.json").write_text("{}")
    assert LocalStorage(tmp_path).foreign_steps() == []
    assert next(iter(LocalStorage(tmp_path).survey()))[0] == 20


def test_a_place_that_was_moved_takes_no_commit(tmp_path: Path) -> None:
    """The folder was created again, without fence and lock, and the commits went there."""
    folder = tmp_path / "checkpoints"
    storage = LocalStorage(folder)
    storage.begin_attempt(3)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is gone"):
        storage.begin(10, 3)
    assert not folder.exists()
    # Nor one that somebody has made in its place.
    folder.mkdir()
    with pytest.raises(OSError, match="was emptied, moved or replaced since attempt 3 began"):
        storage.check_fence(10, 3)


def test_the_last_step_is_committed_though_saves_were_skipped(tmp_path: Path) -> None:
    """With short steps memory was busy when the last one was due, and `close` said nothing."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    mine = CheckpointManager(str(tmp_path), model=model, optimizer=optimizer, save_steps=5, snapshot_steps=None)
    for step in range(mine.resume(), 23):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        mine.step(step + 1)
    mine.close()
    assert Catalog(LocalStorage(tmp_path)).committed_steps()[-1] == 23
    again = CheckpointManager(str(tmp_path), model=model, optimizer=optimizer, save_steps=5)
    assert again.resume() == 23
    # Nothing was done, so nothing is to be committed; and not what is of no step.
    again.close()
    third = CheckpointManager(str(tmp_path), model=model, optimizer=optimizer, save_steps=50)
    third.resume()
    third.step(24)
    optimizer.step()
    third.close()
    assert Catalog(LocalStorage(tmp_path)).committed_steps()[-1] == 23


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A folder with checkpoint-1 and checkpoint-2."""
    mine = manager(tmp_path)
    mine.resume()
    for step in (1, 2):
        mine.save(step, step, wait=True)
    mine.close()
    assert [found for _, found in LocalStorage(tmp_path).survey() if isinstance(found, InvalidCheckpoint)] == []
    return tmp_path


def verified(folder: Path) -> str:
    """What `runner checkpoints verify` prints."""
    ended = run_command("checkpoints", "verify", str(folder))
    assert ended.returncode == 1 and not ended.stderr, ended.stderr
    return ended.stdout


# It may hang.
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["optimizer.pt", "manifest.json"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_only_regular_files_of_its_folder_are_a_checkpoints(name: str, kind: str, whole: Path) -> None:
    """A link to the outside was followed, a pipe was waited for."""
    path = whole / "checkpoint-2" / name
    path.rename(whole / "outside")
    if kind == "link":
        path.symlink_to(whole / "outside")
    else:
        os.mkfifo(path)
    told = verified(whole)
    assert f"{name} is not a regular file" in told and told.count("INVALID") == 1
    mine = manager(whole)
    assert mine.resume() == 1
    mine.close()


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors", "rng_state.pth"])
def test_a_manifest_that_lacks_what_every_checkpoint_has_is_not_valid(name: str, whole: Path) -> None:
    """Its own digest was right, so that it was whole, and training resumed without an optimizer's state."""
    path = whole / "checkpoint-2" / "manifest.json"
    manifest = Manifest.from_json(path.read_bytes(), "")
    path.write_bytes(replace(manifest, files=tuple(f for f in manifest.files if f.name != name)).to_json())
    told = verified(whole)
    assert "is not among its files" in told and name.partition(".")[0] in told and told.count("INVALID") == 1
    mine = manager(whole)
    assert mine.resume() == 1
    mine.close()
