"""S3 and what speaks its protocol, by botocore.

Not through s3fs, though that stands on botocore too: parts go straight from shared memory to the socket, several at a
time, and every call ends. Measured against a black hole, s3fs had not returned after 280 s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from checkpointing.storage.object_storage import ObjectStorage
from checkpointing.storage.object_store import ObjectMissing, StorageError, StorageTimeout
from checkpointing.storage.rates import trial_name
from checkpointing.storage.s3_client import (
    MIN_BYTES_PER_S,
    Missing,
    PreconditionFailed,
    S3Client,
    crc32,
    deadline_s,
    hanging_up,
)
from checkpointing.storage.s3_multipart import IN_FLIGHT, Uploads

_READ_BYTES = 1024 * 1024
# Pages of a listing, one after the other, that name nothing new.
_IDLE_PAGES = 1000


class S3Store:
    """See `ObjectStore`, and `S3Client` for the location. Thread-safe."""

    def __init__(self, location: str) -> None:
        self.transferred: Callable[[int], None] = lambda nbytes: None
        self.retried: Callable[[str], None] = lambda reason: None
        self._client = S3Client(location, 4 * IN_FLIGHT, retried=lambda reason: self.retried(reason))
        self.location = self._client.location
        self.reconnect = self._client.reconnect
        self._pool = ThreadPoolExecutor(2 * IN_FLIGHT, "s3")
        self.shared_uploads = Uploads(
            self._client,
            self._pool,
            transferred=lambda nbytes: self.transferred(nbytes),
            size_of=lambda key: self.sizes(key).get(key),
        )
        self.upload = self.shared_uploads.upload
        self.abort_uploads = self.shared_uploads.abort_unfinished

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Put an object in one call; `If-None-Match` makes it conditional."""
        arguments: dict[str, Any] = {"IfNoneMatch": "*"} if if_absent else {}
        try:
            checksum = crc32(data)
            self._client.call("put_object", key, nbytes=len(data), Body=data, ChecksumCRC32=checksum, **arguments)
        except PreconditionFailed:
            return False
        return True

    def get(self, key: str) -> bytes | None:
        """Get an object in one call."""
        try:
            return bytes(self._client.call("get_object", key, consume=lambda answer: answer["Body"].read()))
        except Missing:
            return None

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """Get a range of an object; a connection that only trickles is closed."""

        def consume(answer: Any) -> None:
            if not str(answer.get("ContentRange", "")).startswith(f"bytes {start}-"):
                raise StorageTimeout(f"{self.location}/{key}: other bytes were answered than those from {start} on")
            limit_s = deadline_s(len(target))
            with hanging_up(answer, limit_s) as hung_up:
                view = target
                while len(view):
                    count = answer["Body"].readinto(view[:_READ_BYTES])
                    if hung_up.is_set():
                        raise StorageTimeout(f"{self.location}/{key}: less than {MIN_BYTES_PER_S} bytes/s arrive")
                    if not count:
                        raise ObjectMissing(f"{self.location}/{key} is shorter than it was")
                    view = view[count:]

        try:
            span = f"bytes={start}-{start + len(target) - 1}"
            self._client.call("get_object", key, Range=span, consume=consume, nbytes=len(target), borrows=True)
            self.transferred(len(target))
        except Missing:
            raise ObjectMissing(f"{self.location}/{key} is missing") from None

    def sizes(self, folder: str = "") -> dict[str, int]:
        """List objects, page by page."""
        found: dict[str, int] = {}
        token: dict[str, Any] = {}
        prefix = self._client.prefix
        idle = 0
        while True:
            page = self._client.call("list_objects_v2", None, Prefix=prefix + folder, **token)
            before = len(found)
            for entry in page.get("Contents", []):
                found[entry["Key"].removeprefix(prefix)] = entry["Size"]
            if not page.get("IsTruncated"):
                return found
            # A page may be empty where many objects were deleted.
            idle = idle + 1 if len(found) == before else 0
            following = page.get("NextContinuationToken")
            if idle > _IDLE_PAGES or not following:
                raise StorageError(f"{self.location}: the server's listing does not end: it is not what S3 answers")
            token = {"ContinuationToken": following}

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects one by one: not every server has the call for many, and its errors hide in a 200."""
        for future in [self._pool.submit(self._client.call, "delete_object", key) for key in keys]:
            future.result()

    @functools.cached_property
    def honours_if_absent(self) -> bool:
        """Whether the server honours `If-None-Match`, found out by trying: rclone's and others let every writer win."""
        key = trial_name("probe/")
        self.put(key, b"first", if_absent=True)
        try:
            return not self.put(key, b"second", if_absent=True)
        finally:
            self.delete([key])


def open_location(location: str) -> ObjectStorage:
    """Open an `s3://` URL; see `S3Client`."""
    return ObjectStorage(S3Store(location))
