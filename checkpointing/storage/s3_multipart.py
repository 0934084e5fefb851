"""Uploads of objects of any size to S3, in parts that are sent in parallel."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Any

from checkpointing.host.failpoints import failpoint
from checkpointing.storage.object_store import StorageError, StorageTimeout
from checkpointing.storage.s3_client import Missing, S3Client, body, crc32

_PART_BYTES = 32 * 1024 * 1024
# What radosgw writes at once. Parts of as many bytes, but not of whole stripes, took 4 % longer.
_STRIPE_BYTES = 4 * 1024 * 1024
# S3 takes no smaller part but for the last.
_LEAST_PART_BYTES = 5 * 1024 * 1024
# S3 allows 10,000 parts; larger objects get larger ones.
_MAX_PARTS = 9_000
# Parts of all uploads together. With six, uploads to radosgw on loopback were 5 % slower (2 cores, 2026-11-22).
IN_FLIGHT = 12
# Of those, what a part takes that has memory of its own: what is read from files is bounded by it.
_PLACES_OF_A_COPY = 2
_UPLOADS_PER_PAGE = 1_000

# What becomes of parts, in order.
_Sent = list[Future[dict[str, Any]]]


class Uploads:
    """The uploads of one client. Thread-safe. See `SharedUploads` for those to which several machines send parts.

    Args:
        client: Makes the calls.
        pool: Sends the parts.
        transferred: Called with the bytes of each part that was sent.
        size_of: Returns the size of an object; None where there is none.
    """

    def __init__(
        self,
        client: S3Client,
        pool: Executor,
        *,
        transferred: Callable[[int], None],
        size_of: Callable[[str], int | None],
    ) -> None:
        self._client, self._pool, self._transferred, self._size_of = client, pool, transferred, size_of
        self._free, self._turn = threading.Semaphore(IN_FLIGHT), threading.Lock()

    def upload(self, key: str, pieces: Iterable[memoryview], nbytes: int | None = None) -> int:
        """Store an object; see `ObjectStore.upload`."""
        sent: _Sent = []
        parts, part_bytes, places = _parts_of(pieces, sent, nbytes)
        first = next(parts, memoryview(b""))
        if len(first) < part_bytes:
            return self._put(key, first)
        upload = self.begin(key)
        try:
            uploaded = self._send(key, upload, 0, itertools.chain([first], parts), sent, places)
            self.complete(key, upload, [future.result() for future in sent], uploaded)
        except BaseException:
            wait(sent)
            self.abort(key, upload)
            raise
        return uploaded

    def begin(self, key: str) -> str:
        """Begin an upload."""
        return str(self._client.call("create_multipart_upload", key)["UploadId"])

    def send(self, key: str, upload: str, first: int, parts: Sequence[memoryview]) -> list[dict[str, Any]]:
        """Send consecutive parts, several at a time."""
        sent: _Sent = []
        try:
            self._send(key, upload, first, parts, sent, places=1)
        finally:
            # The memory is the caller's again.
            wait(sent)
        return [future.result() for future in sent]

    def _send(self, key: str, upload: str, first: int, parts: Iterable[memoryview], sent: _Sent, places: int) -> int:
        """Begin to send parts; return their size in bytes. `sent` is what becomes of them."""
        nbytes = 0
        for number, part in enumerate(parts, first + 1):
            # One at a time: two that have half of their places each would wait for each other.
            with self._turn:
                for _ in range(places):
                    self._free.acquire()
            failed = next((future for future in sent if future.done() and future.exception()), None)
            if failed is not None:
                self._free.release(places)
                raise failed.exception() or AssertionError
            future = self._pool.submit(self._upload_part, key, upload, number, part)
            future.add_done_callback(lambda _: self._free.release(places))
            sent.append(future)
            nbytes += len(part)
        return nbytes

    def abort_unfinished(self, among: Callable[[str], bool] = lambda key: True) -> int:
        """Abort uploads that dead writers have left unfinished; see `ObjectStore.abort_uploads`."""
        num_aborted = 0
        for upload in self._unfinished():
            key = upload["Key"].removeprefix(self._client.prefix)
            if among(key):
                self.abort(key, upload["UploadId"])
                num_aborted += 1
        return num_aborted

    def _put(self, key: str, data: memoryview) -> int:
        checksum = crc32(data)
        self._client.call("put_object", key, Body=body(data), ChecksumCRC32=checksum, nbytes=len(data), borrows=True)
        self._transferred(len(data))
        return len(data)

    def _upload_part(self, key: str, upload_id: str, number: int, part: memoryview) -> dict[str, Any]:
        checksum = crc32(part)
        answer = self._client.call(
            "upload_part",
            key,
            UploadId=upload_id,
            PartNumber=number,
            Body=body(part),
            ChecksumCRC32=checksum,
            nbytes=len(part),
            borrows=True,
        )
        self._transferred(len(part))
        failpoint("remote.part")
        return {"PartNumber": number} | {name: answer[name] for name in ("ETag", "ChecksumCRC32") if name in answer}

    def complete(self, key: str, upload: str, receipts: Sequence[dict[str, Any]], nbytes: int) -> None:
        """Make an object of `nbytes` bytes of the parts."""
        try:
            # Servers may put the parts together before they answer.
            arguments: dict[str, Any] = {"UploadId": upload, "MultipartUpload": {"Parts": list(receipts)}}
            self._client.call("complete_multipart_upload", key, nbytes=nbytes, **arguments)
        except (StorageTimeout, Missing):
            # The answer may have been lost, not the call: the upload is then gone and the object there.
            if self._size_of(key) != nbytes:
                raise

    def _unfinished(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        arguments: dict[str, Any] = {"Prefix": self._client.prefix, "MaxUploads": _UPLOADS_PER_PAGE}
        while True:
            try:
                page = self._client.call("list_multipart_uploads", None, **arguments)
            except Missing:
                # This is how rclone says that there are none.
                return found
            except StorageTimeout:
                raise
            except StorageError:
                # Not allowed with these credentials, or not implemented: a lifecycle rule of the bucket aborts them.
                return found
            found += page.get("Uploads", [])
            if not page.get("IsTruncated") or not page.get("NextKeyMarker"):
                return found
            arguments["KeyMarker"] = page["NextKeyMarker"]
            arguments["UploadIdMarker"] = page.get("NextUploadIdMarker", "")

    def abort(self, key: str, upload: str) -> None:
        """Give an upload up, so that parts that are sent later are refused."""
        try:
            self._client.call("abort_multipart_upload", key, UploadId=upload)
        except StorageError:
            # The next writer's sweep finds it.
            return


def _parts_of(pieces: Iterable[memoryview], sent: _Sent, nbytes: int | None) -> tuple[Iterator[memoryview], int, int]:
    """Return the parts of an object, their size but for the last, and how many places in flight each takes."""
    if not isinstance(pieces, Sequence):

        def one_at_a_time() -> Iterator[memoryview]:
            for piece in pieces:
                yield piece
                # The next one may be in the same memory.
                wait(sent)

        part_bytes = max(_PART_BYTES, -(-(nbytes or 0) // _MAX_PARTS))
        places = min(_PLACES_OF_A_COPY * -(-part_bytes // _PART_BYTES), IN_FLIGHT)
        return cut(one_at_a_time(), part_bytes, stays=False), part_bytes, places
    part_bytes = equal_parts(sum(map(len, pieces)))
    return cut(pieces, part_bytes, stays=True), part_bytes, 1


def cut(pieces: Iterable[memoryview], part_bytes: int, *, stays: bool) -> Iterator[memoryview]:
    """Yield parts of `part_bytes` bytes, but for the last; without a copy where a part is within one piece.

    `stays` says whether a piece still exists when the next one is asked for.
    """
    pending: bytearray | memoryview = memoryview(b"")
    for piece in pieces:
        rest = piece
        if pending:
            taken = rest[: part_bytes - len(pending)]
            rest = rest[len(taken) :]
            if isinstance(pending, memoryview):
                pending = bytearray(pending)
            pending += taken
            if len(pending) < part_bytes:
                continue
            yield memoryview(pending)
        while len(rest) >= part_bytes:
            yield rest[:part_bytes]
            rest = rest[part_bytes:]
        pending = rest if stays else bytearray(rest)
    if pending:
        yield memoryview(pending)


def equal_parts(nbytes: int) -> int:
    """Return the size of an object's parts: equal ones, as nearly as whole stripes can be.

    A small part at the end would leave the other connections idle.
    """
    stripes, num_parts = -(-nbytes // _STRIPE_BYTES), min(-(-nbytes // _PART_BYTES), _MAX_PARTS)
    if num_parts <= 1:
        return _PART_BYTES
    return max(_STRIPE_BYTES * -(-stripes // num_parts), _LEAST_PART_BYTES)
