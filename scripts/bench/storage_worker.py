"""One upload or download in a process of its own; started by `storage.py`. Without torch, like the agent.

Prints one line "RESULT {json}".
"""

from __future__ import annotations

import argparse
import functools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from common import touch_memory

from checkpointing.commit.commit_steps import StagedFile
from checkpointing.commit.protocol import commit_snapshot
from checkpointing.format.digest import digest_buffer
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.host.shared_memory import SharedMemory, round_up
from checkpointing.storage import open_storage

PART_BYTES = 32 * 1024 * 1024


class PeakAnonymous(threading.Thread):
    """The most anonymous memory that this process holds; the arena is shared memory and does not count."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self._peak_bytes = 0

    def run(self) -> None:
        while not self._ended.wait(0.02):
            fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            self._peak_bytes = max(self._peak_bytes, 1024 * int(fields["RssAnon"].split()[0]))

    def stop(self) -> int:
        self._ended.set()
        self.join()
        return self._peak_bytes


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


def upload_ours(folder: Path, bucket: str, prefix: str) -> dict[str, Any]:
    """Commit a whole snapshot as the agent does: one thread digests, another commits."""
    files = stage(folder)
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
    memory = PeakAnonymous()
    memory.start()
    began = time.perf_counter()
    threading.Thread(target=digest).start()
    commit_snapshot(storage, info, staged, at_once=storage.writes_at_once)
    return {"seconds": time.perf_counter() - began, "extra_bytes": memory.stop()}


def quickest_client() -> tuple[Any, TransferConfig]:
    """Return boto3 as its manual tunes it for throughput."""
    config = Config(request_checksum_calculation="when_required", s3={"payload_signing_enabled": False})
    transfer = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=8)
    return boto3.client("s3", config=config), transfer


def upload_best(folder: Path, bucket: str, prefix: str) -> dict[str, Any]:
    """Upload with boto3's `upload_file`, which takes less processor time than `upload_fileobj` for files in memory."""
    client, transfer = quickest_client()
    began = time.perf_counter()
    for path in sorted(folder.iterdir()):
        client.upload_file(str(path), bucket, f"{prefix}/{path.name}", Config=transfer)
    return {"seconds": time.perf_counter() - began}


def download(folder: Path, bucket: str, prefix: str, touch_bytes: int = 0) -> dict[str, Any]:
    """Download everything under the prefix with boto3's `download_file`."""
    client, transfer = quickest_client()
    keys = [item["Key"] for item in client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]]
    if touch_bytes:
        touch_memory(touch_bytes)
    began = time.perf_counter()
    for number, key in enumerate(keys):
        client.download_file(bucket, key, str(folder / str(number)), Config=transfer)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "nbytes": sum(path.stat().st_size for path in folder.iterdir())}


METHODS: dict[str, Callable[[Path, str, str], dict[str, Any]]] = {
    "ours": upload_ours,
    "best": upload_best,
    "download": download,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("folder", type=Path, help="folder to upload from, or to download to")
    parser.add_argument("bucket")
    parser.add_argument("prefix")
    parser.add_argument("--touch", type=int, default=0, help="bytes of memory to touch before a download")
    options = parser.parse_args()
    run = METHODS[options.method]
    if options.method == "download":
        run = functools.partial(download, touch_bytes=options.touch)
    result = run(options.folder, options.bucket, options.prefix)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
