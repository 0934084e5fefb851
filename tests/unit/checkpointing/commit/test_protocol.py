"""From staged files to a checkpoint."""

from __future__ import annotations

import threading

import pytest
from unit.checkpointing.agent.doubles import Store, save

from checkpointing.commit.catalog import Catalog
from checkpointing.commit.protocol import StagedFile, commit_snapshot
from checkpointing.errors import CommitConflict, CommitFailed, InvalidCheckpoint
from checkpointing.format.digest import digest_buffer
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.storage.object_storage import ObjectStorage

INFO = SnapshotInfo("run", 1, 5, 2, 40, {"eval_loss": 0.5})


@pytest.fixture
def store() -> Store:
    return Store()


def staged(name: str, data: bytes) -> StagedFile:
    return StagedFile(name, [memoryview(data)], lambda: digest_buffer(data))


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_checkpoint_has_all_files_with_their_digests(store: Store, at_once: int) -> None:
    files = [staged(name, name.encode()) for name in ("a", "b", "c")]
    manifest = commit_snapshot(ObjectStorage(store), INFO, files, at_once=at_once)
    assert manifest.info == INFO
    assert [(file.name, file.size, file.digest) for file in manifest.files] == [
        (name, 1, digest_buffer(name.encode())) for name in ("a", "b", "c")
    ]
    assert Catalog(ObjectStorage(store)).verify(5).samples_consumed == 40


def test_publishing_may_be_forbidden_at_the_last_moment(store: Store) -> None:
    with pytest.raises(CommitFailed, match="damaged in memory"):
        commit_snapshot(ObjectStorage(store), INFO, [staged("a", b"1")], lambda: False)
    assert store.objects == {}


def test_a_digest_that_differs_leaves_nothing(store: Store) -> None:
    def differs() -> str:
        raise InvalidCheckpoint("checkpoint-5", "a was altered")

    with pytest.raises(InvalidCheckpoint):
        commit_snapshot(ObjectStorage(store), INFO, [StagedFile("a", [memoryview(b"1")], differs)])
    assert store.objects == {}


def test_storage_that_refuses_is_named(store: Store) -> None:
    store.refuses = "no space"
    with pytest.raises(CommitFailed, match="checkpoint-5 at memory://here could not be written: no space"):
        commit_snapshot(ObjectStorage(store), INFO, [staged("a", b"1")])


def test_the_same_checkpoint_again_is_done_already_and_another_one_a_conflict(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ObjectStorage(store)
    commit_snapshot(storage, INFO, [staged("a", b"1")])
    commit_snapshot(storage, INFO, [staged("a", b"1")])
    with pytest.raises(CommitConflict, match="exists already"):
        save(storage, 5)
    assert Catalog(storage).verify(5).files[0].name == "a"


def test_files_are_written_in_parallel_where_that_is_asked_for(store: Store) -> None:
    both = threading.Barrier(2, timeout=60)

    def digest(data: bytes) -> StagedFile:
        class Pieces(list[memoryview]):
            def __iter__(self):  # type: ignore[no-untyped-def]
                both.wait()
                return super().__iter__()

        return StagedFile(data.decode(), Pieces([memoryview(data)]), lambda: digest_buffer(data))

    manifest = commit_snapshot(ObjectStorage(store), INFO, [digest(b"a"), digest(b"b")], at_once=2)
    assert manifest.total_bytes == 2
