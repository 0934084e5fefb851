"""What every storage must keep. New back ends join by a fixture parameter."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointing.catalog import Catalog
from checkpointing.commit import SnapshotInfo, StagedFile, commit_snapshot
from checkpointing.digest import digest_buffer
from checkpointing.errors import CommitConflict, InvalidCheckpoint
from checkpointing.storage import Storage, open_storage


@pytest.fixture(params=["path", "file-url"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    location = str(tmp_path / "store")
    return open_storage(location if request.param == "path" else f"file://{location}")


def commit(storage: Storage, step: int, attempt: int = 1, data: bytes = b"abc") -> None:
    info = SnapshotInfo("run", attempt, step, 2, step * 8)
    files = [staged("a", data), staged("b", b"")]
    commit_snapshot(storage, info, files)


def staged(name: str, data: bytes) -> StagedFile:
    return StagedFile(name, [memoryview(data)], lambda: digest_buffer(data))


def test_an_empty_place_has_no_checkpoints(storage: Storage) -> None:
    assert storage.steps() == [] and Catalog(storage).entries() == [] and storage.sweep() == []


def test_commit_then_read(storage: Storage) -> None:
    commit(storage, 5)
    commit(storage, 100)
    commit(storage, 20)
    assert [entry.step for entry in Catalog(storage).entries()] == [100, 20, 5]
    manifest = Catalog(storage).verify(20)
    assert (manifest.samples_consumed, manifest.world_size) == (160, 2)
    assert (storage.local_path(20) / "a").read_bytes() == b"abc"


def test_nothing_is_visible_before_commit_or_after_abort(storage: Storage) -> None:
    transaction = storage.begin(7, 1)
    transaction.write("a", [memoryview(b"x")])
    assert storage.steps() == []
    transaction.abort()
    transaction.abort()
    assert storage.steps() == [] and storage.sweep() == []


def test_what_a_dead_writer_left_is_swept(storage: Storage) -> None:
    commit(storage, 5)
    storage.begin(7, 1).write("a", [memoryview(b"x")])
    assert len(storage.sweep()) == 1
    assert storage.steps() == [5] and storage.sweep() == []


def test_a_committed_step_is_not_overwritten(storage: Storage) -> None:
    commit(storage, 5, data=b"first")
    with pytest.raises(CommitConflict):
        commit(storage, 5, attempt=2, data=b"second")
    assert (storage.local_path(5) / "a").read_bytes() == b"first"
    assert storage.sweep() == []


def test_every_kind_of_damage_is_found(storage: Storage) -> None:
    for step in range(5):
        commit(storage, step)
    (storage.local_path(0) / "a").write_bytes(b"ab")
    (storage.local_path(1) / "a").write_bytes(b"abd")
    (storage.local_path(2) / "a").unlink()
    (storage.local_path(3) / "manifest.json").unlink()
    (storage.local_path(4) / "manifest.json").write_bytes((storage.local_path(1) / "manifest.json").read_bytes())
    for step, reason in enumerate(["2 bytes", "digest", "cannot be read", "never committed", "of step 1"]):
        with pytest.raises(InvalidCheckpoint, match=reason):
            Catalog(storage).verify(step)
    assert Catalog(storage).committed_steps() == [1]  # only a full read sees a changed byte


def test_set_aside_keeps_and_counts(storage: Storage) -> None:
    for data in (b"one", b"two"):
        commit(storage, 5, data=data)
        assert (Path(storage.set_aside(5)) / "a").read_bytes() == data
    assert storage.steps() == [] and len(storage.set_aside_names()) == 2


def test_remove(storage: Storage) -> None:
    commit(storage, 5)
    storage.remove(5)
    assert storage.steps() == [] and storage.sweep() == []
