"""A checkpoint as a directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.checkpointing.agent.doubles import STATE, Store, save

from checkpointing.errors import CheckpointError, InvalidCheckpoint
from checkpointing.export import export_checkpoint
from checkpointing.storage.object_storage import ObjectStorage


@pytest.fixture
def storage() -> ObjectStorage:
    storage = ObjectStorage(Store())
    save(storage, 5)
    return storage


def test_files_arrive_and_are_counted(storage: ObjectStorage, tmp_path: Path) -> None:
    copied: list[int] = []
    manifest = export_checkpoint(storage, 5, tmp_path / "out", copied.append)
    assert (manifest.step, sum(copied)) == (5, len(STATE))
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "out").iterdir()] == [("file", STATE)]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_altered_file_leaves_no_directory(storage: ObjectStorage, tmp_path: Path) -> None:
    [key] = [key for key in storage.store.sizes() if key.endswith("/file")]
    storage.store.put(key, b"other")
    with pytest.raises(InvalidCheckpoint, match="was altered"):
        export_checkpoint(storage, 5, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_contents_is_kept(storage: ObjectStorage, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(CheckpointError, match="exists already"):
        export_checkpoint(storage, 5, tmp_path)
    with pytest.raises(CheckpointError, match="current directory is not replaced"):
        export_checkpoint(storage, 5, Path())
