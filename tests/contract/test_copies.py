"""`runner checkpoints copy` between places of every kind: killed anywhere, it continues, and nothing torn counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from contract.support import LARGE_BYTES, assert_good_order, assert_is_what_was_written, commit
from helpers.servers import Server, bucket_on

from checkpointing.commit.checkpoint_copy import copy_checkpoint
from checkpointing.errors import CommitConflict
from checkpointing.host.failpoints import FAILPOINTS_ENV
from checkpointing.storage import Storage, open_storage
from checkpointing.storage.object_storage import ObjectStorage

# A place, and at which pass of it.
LOCAL = ["local.begun@1", "local.write@2", "local.written@1", "local.written@2", "local.manifest@1", "local.renamed@1"]
REMOTE = ["remote.uploaded@1", "remote.uploaded@2", "remote.publishing@1", "remote.published@1"]


def test_a_checkpoint_is_copied_to_and_from(storage: Storage, tmp_path: Path) -> None:
    here, back = open_storage(str(tmp_path / "here")), open_storage(str(tmp_path / "back"))
    manifest = commit(here, 3, nbytes=LARGE_BYTES)
    assert copy_checkpoint(here, 3, storage) and not copy_checkpoint(here, 3, storage)
    assert_is_what_was_written(storage, manifest)
    assert copy_checkpoint(storage, 3, back)
    assert_is_what_was_written(back, manifest)


def test_another_checkpoint_is_not_overwritten(storage: Storage, tmp_path: Path) -> None:
    here = open_storage(str(tmp_path / "here"))
    commit(here, 3, attempt=2)
    theirs = commit(storage, 3)
    with pytest.raises(CommitConflict, match="is another checkpoint"):
        copy_checkpoint(here, 3, storage)
    assert_is_what_was_written(storage, theirs)


@pytest.mark.process
@pytest.mark.parametrize("point", LOCAL)
def test_a_killed_copy_to_a_disk_continues(point: str, tmp_path: Path) -> None:
    interrupt(str(tmp_path / "there"), point, tmp_path)


@pytest.mark.parametrize("point", REMOTE)
def test_a_killed_copy_to_s3_continues(
    point: str, radosgw_s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(f"s3://{bucket_on(radosgw_s3, monkeypatch)}/copies", point, tmp_path)


def interrupt(location: str, point: str, tmp_path: Path) -> None:
    manifest = commit(open_storage(str(tmp_path / "here")), 3, nbytes=LARGE_BYTES)
    command = [sys.executable, "-m", "runner", "checkpoints", "copy", str(tmp_path / "here" / "checkpoint-3"), location]
    name, _, number = point.partition("@")
    killed = subprocess.run(
        command, env=os.environ | {FAILPOINTS_ENV: f"{name}=kill@{number}"}, capture_output=True, text=True, timeout=120
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    storage = open_storage(location)
    published = point in ("local.renamed@1", "remote.published@1")
    assert storage.steps() == ([3] if published else [])
    before = stored(storage, tmp_path)
    subprocess.run(command, check=True, timeout=120)
    assert_is_what_was_written(storage, manifest)
    # What was complete has not been written again.
    after = stored(storage, tmp_path)
    assert before.items() <= after.items() and len(after) == 2
    assert_good_order(location, [3])


def stored(storage: Storage, tmp_path: Path) -> dict[str, object]:
    """Return what tells the stored data files apart from a second writing of them, by name."""
    names = ("model", "state")
    if isinstance(storage, ObjectStorage):
        import boto3

        bucket, _, _ = storage.location.removeprefix("s3://").partition("/")
        found = boto3.client("s3").list_objects_v2(Bucket=bucket).get("Contents", [])
        files = [(entry["Key"].rpartition("/")[2], entry["LastModified"]) for entry in found]
    else:
        paths = (tmp_path / "there").rglob("*")
        files = [(path.name, (path.stat().st_ino, path.stat().st_mtime_ns)) for path in paths if path.is_file()]
    return {name: mark for name, mark in files if name in names}
