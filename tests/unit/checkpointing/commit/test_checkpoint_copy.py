"""A checkpoint that is copied is the same there, or is not there; what was copied is not copied again."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path

import pytest
from unit.checkpointing.agent.doubles import Store

from checkpointing.commit.catalog import verify
from checkpointing.commit.checkpoint_copy import check_destination, copy_checkpoint
from checkpointing.commit.protocol import StagedFile, commit_snapshot
from checkpointing.errors import CommitConflict, CommitFailed, InvalidCheckpoint
from checkpointing.format.digest import digest_buffer
from checkpointing.format.manifest import Manifest, SnapshotInfo
from checkpointing.storage import LocalStorage, Storage
from checkpointing.storage.object_storage import ObjectStorage

FILES = {"folder/model": b"weights" * 999, "optimizer": b"state" * 999, "empty": b""}


def commit(storage: Storage, step: int = 5, attempt: int = 1, run_id: str = "run") -> Manifest:
    files = [StagedFile(name, [memoryview(data)], partial(digest_buffer, data)) for name, data in FILES.items()]
    return commit_snapshot(storage, SnapshotInfo(run_id, attempt, step, 1, step), files)


@pytest.fixture
def source(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path / "source")
    commit(storage)
    return storage


@pytest.fixture(params=["disk", "objects"])
def destination(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path / "copies") if request.param == "disk" else ObjectStorage(Store())


def test_a_copy_is_the_same_checkpoint(source: LocalStorage, destination: Storage) -> None:
    copied: list[int] = []
    assert copy_checkpoint(source, 5, destination, copied.append)
    theirs, ours = verify(destination, 5), source.read_manifest(5)
    assert (theirs.info, theirs.files, theirs.created_at) == (ours.info, ours.files, ours.created_at)
    assert theirs.identity == ours.identity and sum(copied) == ours.total_bytes
    assert not copy_checkpoint(source, 5, destination) and destination.sweep() == []


def test_a_copy_is_copied_back(source: LocalStorage, destination: Storage, tmp_path: Path) -> None:
    copy_checkpoint(source, 5, destination)
    back = LocalStorage(tmp_path / "back")
    copy_checkpoint(destination, 5, back)
    assert {name: (back.directory(5) / name).read_bytes() for name in FILES} == FILES


def test_only_what_is_missing_is_copied_after_a_failure(
    source: LocalStorage, destination: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(nbytes: int) -> None:
        if nbytes == len(FILES["optimizer"]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CommitFailed, match=r"could not be copied to .*No space left.*the same command continues"):
        copy_checkpoint(source, 5, destination, full)
    assert destination.steps() == []
    read, file = [], source.file

    def reading(manifest: Manifest, name: str) -> Path:
        read.append(name)
        return file(manifest, name)

    monkeypatch.setattr(source, "file", reading)
    assert copy_checkpoint(source, 5, destination)
    verify(destination, 5)
    assert read == ["optimizer", "empty"]


@pytest.mark.parametrize("other", [{"run_id": "other"}, {"attempt": 2}])
def test_another_checkpoint_of_the_step_is_kept(
    source: LocalStorage, destination: Storage, other: dict[str, str]
) -> None:
    theirs = commit(destination, **other)  # type: ignore[arg-type]
    with pytest.raises(CommitConflict, match=f"another checkpoint .run {theirs.run_id}, attempt {theirs.attempt}. and"):
        copy_checkpoint(source, 5, destination)
    assert verify(destination, 5).info == theirs.info


def test_a_damaged_source_leaves_nothing(source: LocalStorage, destination: Storage) -> None:
    path = source.directory(5) / "optimizer"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(InvalidCheckpoint, match="optimizer was altered"):
        copy_checkpoint(source, 5, destination)
    assert destination.steps() == []
    # Nor would the next copy take the wrong bytes for copied ones.
    path.write_bytes(FILES["optimizer"])
    assert copy_checkpoint(source, 5, destination)
    verify(destination, 5)


def test_a_damaged_copy_is_named(source: LocalStorage, tmp_path: Path) -> None:
    destination = LocalStorage(tmp_path / "copies")
    copy_checkpoint(source, 5, destination)
    (destination.directory(5) / "optimizer").write_bytes(b"?" * len(FILES["optimizer"]))
    with pytest.raises(InvalidCheckpoint, match="optimizer was altered"):
        copy_checkpoint(source, 5, destination)


def test_what_a_disk_got_wrong_does_not_count(
    source: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = LocalStorage(tmp_path / "copies")
    monkeypatch.setattr(
        destination, "refresh", lambda step: (destination.directory(step) / "optimizer").write_bytes(b"?" * 4995)
    )
    with pytest.raises(InvalidCheckpoint, match=r"optimizer was altered.*checkpoint-5\.invalid, and does not count"):
        copy_checkpoint(source, 5, destination)
    assert destination.steps() == []


def test_what_a_location_would_never_load_is_not_copied_there(source: LocalStorage, destination: Storage) -> None:
    destination.begin_attempt(2)
    with pytest.raises(CommitConflict, match=r"is of attempt 1, and would never be loaded from .*choose another"):
        copy_checkpoint(source, 5, destination)
    assert destination.steps() == [] and destination.sweep() == []


@pytest.mark.parametrize(
    ("source", "there", "refused"),
    [
        ("a:30", "", None),
        ("a:30", "a:10", None),
        # The same run has gone on.
        ("a:10", "a:20 b:30", None),
        # The destination's run is one that the source's has continued.
        ("a:10 b:20", "a:10", None),
        ("b:40", "a:10 b:30", None),
        ("b:30", "a:10", "a"),
        ("a:10 b:20", "a:15", "a"),
        ("a:30", "a:10 b:20", "b"),
        ("a:30", "b:10", "b"),
        ("a:5", "b:10", "b"),
    ],
)
def test_what_another_run_would_resume_from_is_not_copied(
    source: str, there: str, refused: str | None, tmp_path: Path
) -> None:
    def filled(name: str, checkpoints: str) -> LocalStorage:
        storage = LocalStorage(tmp_path / name)
        for run_id, _, step in (one.partition(":") for one in checkpoints.split()):
            commit(storage, int(step), run_id=run_id)
        return storage

    here, destination = filled("here", source), filled("there", there)
    manifests = [here.read_manifest(step) for step in here.steps()]
    if refused is None:
        check_destination(manifests[-1:], manifests, destination)
    else:
        with pytest.raises(CommitConflict, match=rf"there is of another run \({refused}\), which would resume"):
            check_destination(manifests[-1:], manifests, destination)


@pytest.mark.parametrize(("lineage", "known", "fits"), [("run", "", True), ("old", "old", True), ("old", "", False)])
def test_a_run_that_has_committed_nothing_yet_is_known_by_its_restart_state(
    source: LocalStorage, destination: Storage, lineage: str, known: str, fits: bool
) -> None:
    chosen = [source.read_manifest(5)]
    if fits:
        check_destination(chosen, chosen, destination, lineage=lineage, known=known)
    else:
        with pytest.raises(CommitConflict, match=r"is of another run .old., which would resume from checkpoint-5"):
            check_destination(chosen, chosen, destination, lineage=lineage, known=known)


def test_all_steps_are_compared_before_the_first_is_copied(source: LocalStorage, destination: Storage) -> None:
    commit(source, 6)
    commit(destination, 6, attempt=2)
    manifests = [source.read_manifest(step) for step in (5, 6)]
    with pytest.raises(CommitConflict, match=r"is another checkpoint .run run, attempt 2. and is kept"):
        check_destination(manifests, manifests, destination)
