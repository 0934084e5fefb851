"""One upload or download in a process of its own. Without torch, like the agent."""

from __future__ import annotations

import functools
import threading
import time
from pathlib import Path
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from library.measuring import Peak, own_anonymous_bytes, touch_memory
from library.orders import carry_out

from checkpointing.commit.protocol import StagedFile, commit_snapshot
from checkpointing.format.digest import digest_buffer
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.host.shared_memory import SharedMemory, round_up
from checkpointing.storage import open_storage

PART_BYTES = 32 * 1024 * 1024


def stage(folder: Path) -> dict[str, memoryview]:
    """Read a folder's files into an arena, page-aligned, as ranks leave them."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    arena = SharedMemory.create("bench-arena", sum(map(round_up, sizes.values())))
    files, offset = {}, 0
    for name, size in sizes.items():
        files[name] = arena.buffer[offset : offset + size]
        with (folder / name).open("rb") as file:
            if file.readinto(files[name]) != size:
                raise OSError(0, f"{name} shrank while it was read")
        offset += round_up(size)
    return files


def upload_ours(folder: str, bucket: str, prefix: str) -> dict[str, Any]:
    """Commit a whole snapshot as the agent does: one thread digests, another commits."""
    files = stage(Path(folder))
    storage = open_storage(f"s3://{bucket}/{prefix}")
    digests: dict[str, str] = {}
    digested = threading.Event()

    def digest() -> None:
        digests.update((name, digest_buffer(view)) for name, view in files.items())
        digested.set()

    def digest_of(name: str) -> str:
        digested.wait()
        return digests[name]

    staged = [StagedFile(name, [view], functools.partial(digest_of, name)) for name, view in files.items()]
    info = SnapshotInfo(run_id="bench", attempt=1, step=1, world_size=1, samples_consumed=1)
    storage.begin_attempt(1)
    # The arena is shared memory and does not count.
    with Peak(own_anonymous_bytes, every_s=0.02) as peak:
        began = time.perf_counter()
        threading.Thread(target=digest).start()
        commit_snapshot(storage, info, staged, at_once=storage.writes_at_once)
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "extra_bytes": peak.nbytes}


def quickest_client() -> tuple[Any, TransferConfig]:
    """Return boto3 as its manual tunes it for throughput."""
    config = Config(request_checksum_calculation="when_required", s3={"payload_signing_enabled": False})
    transfer = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=8)
    return boto3.client("s3", config=config), transfer


def upload_best(folder: str, bucket: str, prefix: str) -> dict[str, Any]:
    """Upload with boto3's `upload_file`, which takes less processor time than `upload_fileobj` for files in memory."""
    client, transfer = quickest_client()
    began = time.perf_counter()
    for path in sorted(Path(folder).iterdir()):
        client.upload_file(str(path), bucket, f"{prefix}/{path.name}", Config=transfer)
    return {"seconds": time.perf_counter() - began}


def download(folder: str, bucket: str, prefix: str, touch_bytes: int) -> dict[str, Any]:
    """Download everything under the prefix with boto3's `download_file`."""
    client, transfer = quickest_client()
    keys = [item["Key"] for item in client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]]
    if touch_bytes:
        touch_memory(touch_bytes)
    began = time.perf_counter()
    for number, key in enumerate(keys):
        client.download_file(bucket, key, f"{folder}/{number}", Config=transfer)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "nbytes": sum(path.stat().st_size for path in Path(folder).iterdir())}


if __name__ == "__main__":
    carry_out({"ours": upload_ours, "best": upload_best, "download": download})
