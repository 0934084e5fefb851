"""Which checkpoints exist, over one storage and over several."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from unit.checkpointing.agent.doubles import STATE, Store, save

from checkpointing.commit.catalog import Catalog
from checkpointing.errors import InvalidCheckpoint
from checkpointing.format.manifest import Manifest
from checkpointing.storage import LocalStorage, Storage
from checkpointing.storage.object_storage import ObjectStorage


@pytest.fixture(params=["local", "objects"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path) if request.param == "local" else ObjectStorage(Store())


def test_entries_come_newest_first(storage: Storage) -> None:
    for step in (5, 100, 20):
        save(storage, step)
    catalog = Catalog(storage)
    assert [entry.step for entry in catalog.entries()] == [100, 20, 5]
    assert catalog.committed_steps() == [5, 20, 100]
    assert catalog.newest_attempt() == 1


def test_what_a_run_removes_meanwhile_is_not_called_damaged(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (5, 20):
        save(storage, step)
    listing = storage._sizes()
    storage.remove(5)
    sizes = storage._sizes
    found = [listing]
    monkeypatch.setattr(storage, "_sizes", lambda step=None: found.pop() if found else sizes(step))
    assert [entry.step for entry in Catalog(storage).scan()] == [20]


def test_damaged_checkpoints_do_not_have_all_others_listed_again(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 2,000 of them a start stood still for minutes."""
    for step in (5, 20, 40):
        save(storage, step)
    monkeypatch.setattr(Manifest, "from_json", damaged)
    monkeypatch.setattr(storage, "steps", lambda: pytest.fail("all of them were listed again"))
    assert [entry.problem for entry in Catalog(storage).scan()] == ["it is damaged"] * 3


def damaged(data: bytes, where: str) -> Manifest:
    raise InvalidCheckpoint(where, "it is damaged")


def test_a_step_that_is_not_there_is_named_with_those_that_are(storage: Storage) -> None:
    save(storage, 5)
    with pytest.raises(InvalidCheckpoint, match="there is no such checkpoint; committed steps: 5"):
        Catalog(storage).find(7)
    with pytest.raises(InvalidCheckpoint, match="committed steps: none"):
        Catalog(ObjectStorage(Store())).find(7)


def test_every_file_is_read_to_verify_a_checkpoint(storage: Storage) -> None:
    save(storage, 5)
    read: list[int] = []
    assert Catalog(storage).verify(5, read.append).step == 5
    assert read == [len(STATE)]


def test_an_altered_file_is_found(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    save(storage, 5)
    (tmp_path / "checkpoint-5" / "file").write_bytes(b"other")
    with pytest.raises(InvalidCheckpoint, match="file was altered"):
        Catalog(storage).verify(5)


def test_the_durable_fence_counts_for_all_copies(tmp_path: Path) -> None:
    local, durable = LocalStorage(tmp_path), ObjectStorage(Store())
    save(local, 20)
    save(durable, 10)
    durable.begin_attempt(2)
    [first, second] = Catalog(local, durable).entries()
    assert (first.step, first.manifest) == (20, None)
    assert "after a newer one had begun elsewhere" in (first.problem or "")
    assert second.manifest is not None


def test_a_checkpoint_of_another_program_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text(json.dumps({"global_step": 5}))
    [entry] = Catalog(LocalStorage(tmp_path)).entries()
    assert entry.is_foreign and "this library has not written it" in (entry.problem or "")


@pytest.mark.parametrize("name", ["checkpoint-5", "checkpoint-5/manifest.json"])
def test_a_checkpoint_that_cannot_be_read_now_is_not_called_damaged(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, whose server has restarted: a resume would set the newest checkpoint aside."""
    storage = LocalStorage(tmp_path)
    save(storage, 5)
    stale, scandir, read_bytes = str(tmp_path / name), os.scandir, Path.read_bytes

    def known(path: object) -> Any:
        if str(path) == stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return path

    monkeypatch.setattr(os, "scandir", lambda path: scandir(known(path)))
    monkeypatch.setattr(Path, "read_bytes", lambda path: read_bytes(known(path)))
    with pytest.raises(OSError, match="Stale file handle"):
        Catalog(storage).entries()


def test_a_folder_of_another_user_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start is not held up by it."""
    storage, scandir = LocalStorage(tmp_path), os.scandir
    for step in (5, 6):
        save(storage, step)

    def known(path: Any) -> Any:
        if "checkpoint-6" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return path

    monkeypatch.setattr(os, "scandir", lambda path: scandir(known(path)))
    monkeypatch.setattr(Path, "lstat", lambda path: os.lstat(known(path)))
    assert Catalog(storage).committed_steps() == [5]
    # Nobody renames it.
    assert [entry.is_foreign for entry in Catalog(storage).entries()] == [True, False]


def test_a_checkpoint_that_was_removed_during_the_look_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS says of it that it is stale."""
    storage, scandir = LocalStorage(tmp_path), os.scandir
    save(storage, 5)
    save(storage, 6)

    def stale(path: object) -> object:
        if str(path).endswith("checkpoint-5"):
            storage.directory(5).rename(tmp_path / ".checkpoint-5.removing")
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return scandir(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", stale)
    assert Catalog(storage).committed_steps() == [6]
