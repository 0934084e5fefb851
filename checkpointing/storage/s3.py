"""S3 and what speaks its protocol, by botocore.

Not through s3fs, though that stands on botocore too: parts go straight from shared memory to the socket, several at a
time, and every call ends. Measured against a black hole, s3fs had not returned after 280 s.
"""

from __future__ import annotations

import functools
import itertools
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import tenacity
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
)

from checkpointing.failpoints import failpoint
from checkpointing.storage.object_storage import ObjectStorage
from checkpointing.storage.object_store import ObjectMissing, StorageError, StorageTimeout
from checkpointing.storage.s3_errors import Missing, PreconditionFailed, check_is_s3, translated
from checkpointing.storage.s3_transport import (
    MIN_BYTES_PER_S,
    body,
    crc32,
    cut,
    deadline_s,
    hanging_up,
    lay_body_aside,
    take_body_up,
    within,
)

_PART_BYTES = 32 * 1024 * 1024
# What radosgw writes at once. Parts of as many bytes, but not of whole stripes, took 4 % longer.
_STRIPE_BYTES = 4 * 1024 * 1024
# S3 takes no smaller part but for the last.
_LEAST_PART_BYTES = 5 * 1024 * 1024
# Parts of all uploads together. With six, uploads to radosgw on loopback were 5 % slower (2 cores, 2026-11-22).
_IN_FLIGHT = 12
# Of those, what a part takes that has memory of its own: what is read from files is bounded by it.
_PLACES_OF_A_COPY = 2
_READ_BYTES = 1024 * 1024
_UPLOADS_PER_PAGE = 1_000
_CONNECT_TIMEOUT_S = 5
# Longest silence on a connection. A slow link is not silent.
_SILENCE_TIMEOUT_S = 15
# Longest wait for the whole of a small answer, besides what the bytes need that were sent.
_ANSWER_WITHIN_S = 60.0


class S3Store:
    """See `ObjectStore`. Thread-safe."""

    def __init__(self, location: str) -> None:
        """Credentials, region and endpoint come from where AWS's tools take them (`AWS_ENDPOINT_URL`, ...).

        Raises:
            ValueError: the URL names no bucket.
        """
        import boto3

        self.location = location.rstrip("/")
        bucket, _, prefix = location.removeprefix("s3://").rstrip("/").partition("/")
        if not bucket:
            raise ValueError(f"checkpoint.location {location!r} names no bucket; use s3://bucket/prefix")
        self._bucket, self._prefix = bucket, f"{prefix}/" if prefix else ""
        config = Config(
            connect_timeout=_CONNECT_TIMEOUT_S,
            read_timeout=_SILENCE_TIMEOUT_S,
            retries={"total_max_attempts": 1},  # ours, so that they end
            max_pool_connections=4 * _IN_FLIGHT,
            parameter_validation=False,  # which would refuse a memoryview, and so cost a copy of every part
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"payload_signing_enabled": False},
        )
        try:
            session = boto3.session.Session()
            region = session.region_name or "us-east-1"
            self._client: Any = session.client("s3", config=config, region_name=region)
            self._client.meta.events.register_first("before-sign.s3", lay_body_aside)
            self._client.meta.events.register_last("request-created.s3", take_body_up)
        except (BotoCoreError, ValueError) as error:
            raise ValueError(f"checkpoint.location {location!r}: {error}") from None
        self._pool = ThreadPoolExecutor(2 * _IN_FLIGHT, "s3")
        self._free = threading.Semaphore(_IN_FLIGHT)
        self.transferred: Callable[[int], None] = lambda nbytes: None
        self.retried: Callable[[str], None] = lambda reason: None

    # -- the protocol --------------------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        arguments: dict[str, Any] = {"IfNoneMatch": "*"} if if_absent else {}
        try:
            self._call("put_object", key, nbytes=len(data), Body=data, ChecksumCRC32=crc32(data), **arguments)
        except PreconditionFailed:
            return False
        return True

    def upload(self, key: str, pieces: Iterable[memoryview]) -> int:
        sent: list[Future[dict[str, Any]]] = []

        def one_at_a_time() -> Iterator[memoryview]:
            for piece in pieces:
                yield piece
                # The next one may lie in the same memory.
                wait(sent)

        part_bytes, places = _PART_BYTES, 1
        if isinstance(pieces, Sequence):
            # Equal ones, as nearly as whole stripes can be: a small one at the end would leave the connections idle.
            whole = sum(map(len, pieces))
            stripes, num_parts = -(-whole // _STRIPE_BYTES), -(-whole // _PART_BYTES)
            if num_parts > 1:
                part_bytes = max(_STRIPE_BYTES * -(-stripes // num_parts), _LEAST_PART_BYTES)
            parts = cut(pieces, part_bytes, stays=True)
        else:
            parts, places = cut(one_at_a_time(), part_bytes, stays=False), _PLACES_OF_A_COPY
        first = next(parts, memoryview(b""))
        if len(first) < part_bytes:
            checksum = crc32(first)
            self._call("put_object", key, Body=body(first), ChecksumCRC32=checksum, nbytes=len(first), borrows=True)
            self.transferred(len(first))
            return len(first)
        upload_id = self._call("create_multipart_upload", key)["UploadId"]
        nbytes = 0
        try:
            for part in itertools.chain([first], parts):
                for _ in range(places):
                    self._free.acquire()
                failed = next((future for future in sent if future.done() and future.exception()), None)
                if failed is not None:
                    self._free.release(places)
                    raise failed.exception() or AssertionError
                future = self._pool.submit(self._upload_part, key, upload_id, len(sent) + 1, part)
                future.add_done_callback(lambda _: self._free.release(places))
                sent.append(future)
                nbytes += len(part)
            finished = [future.result() for future in sent]
            self._complete(key, upload_id, finished, nbytes)
        except BaseException:
            wait(sent)
            self._abort(key, upload_id)
            raise
        return nbytes

    def get(self, key: str) -> bytes | None:
        try:
            return bytes(self._call("get_object", key, consume=lambda answer: answer["Body"].read()))
        except Missing:
            return None

    def read_into(self, key: str, start: int, target: memoryview) -> None:
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
            self._call("get_object", key, Range=span, consume=consume, nbytes=len(target), borrows=True)
            self.transferred(len(target))
        except Missing:
            raise ObjectMissing(f"{self.location}/{key} is missing") from None

    def sizes(self, folder: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        token: dict[str, Any] = {}
        while True:
            page = self._call("list_objects_v2", None, Prefix=self._prefix + folder, **token)
            for entry in page.get("Contents", []):
                found[entry["Key"].removeprefix(self._prefix)] = entry["Size"]
            if not page.get("IsTruncated"):
                return found
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, keys: Sequence[str]) -> None:
        # One by one: not every server has the call for many, and its errors hide in a 200.
        for future in [self._pool.submit(self._call, "delete_object", key) for key in keys]:
            future.result()

    @functools.cached_property
    def honours_if_absent(self) -> bool:
        """Found out by trying: rclone's server and others let every writer win."""
        key = f"probe/{uuid.uuid4().hex}"
        self.put(key, b"first", if_absent=True)
        try:
            return not self.put(key, b"second", if_absent=True)
        finally:
            self.delete([key])

    def abort_uploads(self, among: Callable[[str], bool] = lambda key: True) -> int:
        found = (
            (upload["Key"].removeprefix(self._prefix), upload["UploadId"]) for upload in self._unfinished_uploads()
        )
        uploads = [(key, upload_id) for key, upload_id in found if among(key)]
        for key, upload_id in uploads:
            self._abort(key, upload_id)
        return len(uploads)

    # -- inside --------------------------------------------------------------------------------------------------

    def _upload_part(self, key: str, upload_id: str, number: int, part: memoryview) -> dict[str, Any]:
        checksum = crc32(part)
        answer = self._call(
            "upload_part",
            key,
            UploadId=upload_id,
            PartNumber=number,
            Body=body(part),
            ChecksumCRC32=checksum,
            nbytes=len(part),
            borrows=True,
        )
        self.transferred(len(part))
        failpoint("remote.part")
        entry = {"PartNumber": number, "ETag": answer["ETag"]}
        if "ChecksumCRC32" in answer:
            entry["ChecksumCRC32"] = answer["ChecksumCRC32"]
        return entry

    def _complete(self, key: str, upload_id: str, parts: list[dict[str, Any]], nbytes: int) -> None:
        try:
            # Servers may put the parts together before they answer.
            whole = {"Parts": parts}
            self._call("complete_multipart_upload", key, nbytes=nbytes, UploadId=upload_id, MultipartUpload=whole)
        except (StorageTimeout, Missing):
            # The answer may have been lost, not the call: the upload is then gone and the object there.
            if self.sizes(key).get(key) != nbytes:
                raise

    def _unfinished_uploads(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        arguments: dict[str, Any] = {"Prefix": self._prefix, "MaxUploads": _UPLOADS_PER_PAGE}
        while True:
            try:
                page = self._call("list_multipart_uploads", None, **arguments)
            except Missing:  # rclone's way to say that there are none
                return found
            except StorageTimeout:
                raise
            except StorageError:
                # Not allowed to these credentials, or not known there: a lifecycle rule of the bucket's ends them.
                return found
            found += page.get("Uploads", [])
            if not page.get("IsTruncated") or not page.get("NextKeyMarker"):
                return found
            arguments["KeyMarker"] = page["NextKeyMarker"]
            arguments["UploadIdMarker"] = page.get("NextUploadIdMarker", "")

    def _abort(self, key: str, upload_id: str) -> None:
        try:
            self._call("abort_multipart_upload", key, UploadId=upload_id)
        except StorageError:
            # The next writer's sweep finds it.
            return

    def _call(
        self,
        name: str,
        key: str | None,
        *,
        nbytes: int = 0,
        consume: Callable[[Any], Any] | None = None,
        borrows: bool = False,
        **arguments: Any,
    ) -> Any:
        """One operation, tried again while that may help; ends within its deadline.

        Args:
            borrows: it works on the caller's memory, so it must be over when this returns, and keeps the time itself.
        """
        if key is not None:
            arguments["Key"] = self._prefix + key
        what = f"{name.replace('_', ' ')} {self.location}" + (f"/{key}" if key else "")

        def once() -> Any:
            try:
                answer = getattr(self._client, name)(Bucket=self._bucket, **arguments)
                check_is_s3(name, answer, what)
                return answer if consume is None else consume(answer)
            except ClientError as error:
                raise translated(error, what) from None
            except (NoCredentialsError, PartialCredentialsError, ProfileNotFound) as error:
                text = f"{what}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
                raise StorageError(text) from None
            except ParamValidationError as error:
                reason = " ".join(str(error).split())
                raise StorageError(f"{what}: the bucket's or the object's name is not allowed: {reason}") from None
            except (BotoCoreError, OSError) as error:
                if isinstance(error, StorageError):
                    raise
                raise StorageTimeout(f"{what}: {error}") from None

        retried = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StorageTimeout),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=10),
            stop=tenacity.stop_after_delay(deadline_s(nbytes)),
            before_sleep=lambda state: self.retried(str(state.outcome and state.outcome.exception())),
            reraise=True,
        )
        if borrows:
            return retried(once)
        return retried(within, _ANSWER_WITHIN_S + nbytes / MIN_BYTES_PER_S, once, what)


def open_location(location: str) -> ObjectStorage:
    """Open an `s3://` URL.

    Args:
        location: URL.

    Returns:
        The storage.

    Raises:
        ValueError: The URL names no bucket, or the configuration of AWS cannot be used.
    """
    return ObjectStorage(S3Store(location))
