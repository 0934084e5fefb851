"""Shared by the tests of faults: checkpoints to write, and checks of the invariants afterwards. Imports no torch."""

from __future__ import annotations

import mmap
import random
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from checkpointing.commit.catalog import Catalog
from checkpointing.commit.protocol import StagedFile, commit_snapshot
from checkpointing.commit.replicated_save import ReplicatedCommit, ReplicatedSave, write_portion
from checkpointing.commit.sharded_save import ShardedCommit, ShardedSave, write_shards
from checkpointing.format.digest import digest_buffer
from checkpointing.format.manifest import Manifest, SnapshotInfo
from checkpointing.format.shard_index import INDEX_NAME, HeldFile, ShardParts, parts_name, shard_name
from checkpointing.storage import Storage, open_storage

SMALL_BYTES = 2 << 20
# S3's least is 5 MB. So small that what takes two of them is soon sent.
PART_BYTES = 6 << 20
LARGE_BYTES = 11 << 20


def commit(
    storage: Storage,
    step: int,
    attempt: int = 1,
    nbytes: int = SMALL_BYTES,
    may_publish: Callable[[], bool] = lambda: True,
) -> Manifest:
    """Return a file of page-aligned memory, as in an arena, and one of unaligned memory."""
    memory = mmap.mmap(-1, nbytes)
    memory[:] = random.Random(step).randbytes(nbytes)
    files = [staged("model", memoryview(memory)), staged("state", memoryview(b"step %d" % step))]
    info = SnapshotInfo("run", attempt, step, 2, step * 8)
    return commit_snapshot(storage, info, files, may_publish, at_once=storage.writes_at_once)


def commit_together(location: str, step: int, attempt: int = 1) -> Manifest:
    """Commit a checkpoint of which another node writes a shard."""
    data = [memoryview(random.Random(step + rank).randbytes(SMALL_BYTES)) for rank in range(2)]
    parts = [ShardParts.of(own) for own in data]
    save, info = (
        ShardedSave(f"{step:012x}", (shard_name(0), shard_name(1))),
        SnapshotInfo("run", attempt, step, 2, step),
    )
    shard = HeldFile(shard_name(1), data[1], lambda: parts[1])
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(write_shards, open_storage(location), info, save, [shard])
        files = [staged(shard_name(0), data[0]), staged(parts_name(shard_name(0)), memoryview(parts[0].to_json()))]
        files.append(staged(INDEX_NAME, memoryview(b"{}")))
        storage = open_storage(location)
        manifest = commit_snapshot(storage, info, files, save=ShardedCommit(storage, info, save))
        other.result()
    return manifest


def commit_split(location: str, step: int, attempt: int = 1) -> Manifest:
    """Commit a checkpoint of one file, half of whose parts another node writes."""
    data = memoryview(random.Random(step).randbytes(1 << 20) * 33)
    parts, info = ShardParts.of(data), SnapshotInfo("run", attempt, step, 2, step)
    file = HeldFile("model", data, lambda: parts)
    own, others = (ReplicatedSave(f"{step:012x}", node, 2, ("model",)) for node in range(2))
    save = ReplicatedCommit(own, [file])
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(write_portion, open_storage(location), info, others, [file])
        files = [staged("model", data), staged("state", memoryview(b"step %d" % step))]
        manifest = commit_snapshot(open_storage(location), info, files, save=save)
        other.exception()
    return manifest


def staged(name: str, data: memoryview) -> StagedFile:
    return StagedFile(name, [data], lambda: digest_buffer(data))


def assert_is_what_was_written(storage: Storage, manifest: Manifest) -> None:
    """Check that the checkpoint counts, and is the one that `commit` returned."""
    # The storage decides where the files are.
    assert replace(Catalog(storage).verify(manifest.step), folder="") == manifest


def assert_good_order(location: str, kept: Iterable[int], attempt: int = 9, nbytes: int = SMALL_BYTES) -> None:
    """Check that the next attempt finds the committed checkpoints whole and can commit, and that no files are left."""
    storage = open_storage(location)
    storage.begin_attempt(attempt)
    storage.sweep()
    catalog = Catalog(storage)
    entries = catalog.entries()
    assert [(entry.step, entry.problem) for entry in entries if entry.problem] == []
    steps = {entry.step for entry in entries}
    assert set(kept) <= steps
    for step in sorted(steps):
        catalog.verify(step)
    assert leftovers(location) == [] and storage.sweep() == []
    assert_is_what_was_written(storage, commit(storage, 99, attempt, nbytes))


def leftovers(location: str) -> list[str]:
    """Return files that belong neither to a checkpoint, quarantined or not, nor to the newest fence; and missing files.

    They are found without the product's code.
    """
    names, uploads = _remote_names(location) if location.startswith("s3://") else (_local_names(Path(location)), [])
    manifests = [name for name in names if re.fullmatch(r"checkpoint-\d+[^/]*/manifest[^/]*\.json", name)]
    fences = [name for name in names if re.fullmatch(r"\.fence\.json|fence/\d+\.json", name)]
    wanted = {*sorted(fences)[-1:]}
    for name in manifests:
        manifest = Manifest.from_json(names[name], name)
        folder = manifest.folder or name.partition("/")[0]
        wanted |= {name} | {f"{folder}/{file.name}" for file in manifest.files}
    return sorted({*names} ^ wanted) + uploads


def _local_names(root: Path) -> dict[str, bytes]:
    paths = [path for path in root.rglob("*") if not path.is_dir() or not any(path.iterdir())]
    return {str(path.relative_to(root)): path.read_bytes() if path.suffix == ".json" else b"" for path in paths}


def _remote_names(location: str) -> tuple[dict[str, bytes], list[str]]:
    import boto3
    from botocore.exceptions import ClientError

    bucket, _, prefix = location.removeprefix("s3://").partition("/")
    client, names = boto3.client("s3"), {}
    for entry in client.list_objects_v2(Bucket=bucket).get("Contents", []):
        key = entry["Key"]
        data = client.get_object(Bucket=bucket, Key=key)["Body"].read() if key.endswith(".json") else b""
        names[key.removeprefix(f"{prefix}/")] = data
    try:
        uploads = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    except ClientError as error:
        # rclone's errors if there are no uploads.
        if error.response["Error"]["Code"] not in ("NoSuchKey", "NoSuchUpload"):
            raise
        uploads = []
    return names, [f"upload of {upload['Key']}" for upload in uploads]
