"""A checkpoint as a directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.spread_checkpoint import COLUMNS, FILE, NAME, ROWS, STATE, commit_spread
from safetensors.torch import load_file
from unit.checkpointing.agent import doubles
from unit.checkpointing.agent.doubles import Store, save

from checkpointing.commit import export
from checkpointing.commit.export import export_checkpoint, export_model, readable_directory
from checkpointing.commit.shard_reading import PartReader
from checkpointing.errors import CheckpointError, InvalidCheckpoint
from checkpointing.format.shard_index import Piece, shard_name
from checkpointing.storage import LocalStorage
from checkpointing.storage.object_storage import ObjectStorage


@pytest.fixture
def storage() -> ObjectStorage:
    storage = ObjectStorage(Store())
    save(storage, 5)
    return storage


def test_files_arrive_and_are_counted(storage: ObjectStorage, tmp_path: Path) -> None:
    copied: list[int] = []
    manifest = export_checkpoint(storage, 5, tmp_path / "out", copied.append)
    assert (manifest.step, sum(copied)) == (5, len(doubles.STATE))
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "out").iterdir()] == [("file", doubles.STATE)]
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


@pytest.mark.parametrize("pieces", [ROWS, COLUMNS], ids=["rows", "columns"])
def test_a_file_in_shards_is_put_together(pieces: list[Piece], tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    commit_spread(storage, 5, pieces)
    export_checkpoint(storage, 5, tmp_path / "out")
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {NAME: FILE, "rng_state.pth": b"generators"}


def test_each_part_of_a_shard_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file goes from shard to shard again and again, tensor by tensor, and there may be hundreds of shards."""
    part, read = PartReader._part, list[str]()

    def counted(self: PartReader, number: int) -> memoryview:
        read.append(self._name)
        return part(self, number)

    monkeypatch.setattr(PartReader, "_part", counted)
    storage, begin = LocalStorage(tmp_path / "run"), ROWS[0].offset
    pieces = [tuple(Piece(begin + 4 * (shard + 12 * half), 4) for half in range(2)) for shard in range(12)]
    commit_spread(storage, 5, pieces)
    export_checkpoint(storage, 5, tmp_path / "out")
    assert (tmp_path / "out" / NAME).read_bytes() == FILE
    assert sorted(read) == sorted(shard_name(rank) for rank in range(12))


def test_a_large_model_becomes_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MOST_MODEL_BYTES", 100)
    storage = LocalStorage(tmp_path / "run")
    commit_spread(storage, 5, COLUMNS)
    export_checkpoint(storage, 5, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert index == {"metadata": {"total_size": 108}, "weight_map": dict(zip(sorted(STATE), names, strict=True))}
    loaded = {name: tensor for file in names for name, tensor in load_file(tmp_path / "out" / file).items()}
    assert loaded.keys() == STATE.keys() and all(torch.equal(loaded[name], STATE[name]) for name in STATE)


def test_an_altered_shard_leaves_no_directory(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    commit_spread(storage, 5, ROWS)
    with (tmp_path / "run" / "checkpoint-5" / "shards" / "1.bin").open("r+b") as shard:
        shard.write(b"?")
    with pytest.raises(InvalidCheckpoint, match=r"shards/1\.bin was altered"):
        export_checkpoint(storage, 5, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_directory_to_read_is_the_checkpoints_own_or_put_together(tmp_path: Path, storage: ObjectStorage) -> None:
    local, scratch = LocalStorage(tmp_path / "local"), tmp_path / "scratch"
    save(local, 5)
    assert readable_directory(local, 5, scratch) == local.directory(5) and not scratch.exists()
    assert readable_directory(storage, 5, scratch) == scratch and (scratch / "file").read_bytes() == doubles.STATE
    commit_spread(local, 6, ROWS)
    assert (readable_directory(local, 6, tmp_path / "shards") / NAME).read_bytes() == FILE
    assert list(readable_directory(local, 6, tmp_path / "none", without=lambda name: True).iterdir()) == []
    (local.directory(5) / "file").write_bytes(b"?" * len(doubles.STATE))
    with pytest.raises(InvalidCheckpoint, match="file was altered"):
        readable_directory(local, 5, scratch)
    assert readable_directory(local, 5, scratch, without=lambda name: name == "file") == local.directory(5)


def test_a_model_is_converted_without_what_training_reads(tmp_path: Path) -> None:
    local = LocalStorage(tmp_path / "local")
    commit_spread(local, 5, ROWS)

    def convert(source: Path, target: Path) -> None:
        assert [path.name for path in source.iterdir()] == [NAME]
        (target / "model").write_bytes((source / NAME).read_bytes())

    export_model(local, 5, tmp_path / "out", convert)
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "out").iterdir()] == [("model", FILE)]

    def fail(source: Path, target: Path) -> None:
        raise CheckpointError("no")

    with pytest.raises(CheckpointError, match="no"):
        export_model(local, 5, tmp_path / "none", fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["local", "out"]
