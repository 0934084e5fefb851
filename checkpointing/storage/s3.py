"""S3 and what speaks its protocol, by botocore.

Not through s3fs, though that stands on botocore too: parts go straight from shared memory to the socket, several at a
time, and every call ends. Measured against a black hole, s3fs had not returned after 280 s.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

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
from isal import isal_zlib

from checkpointing.failpoints import failpoint
from checkpointing.storage.object_store import ObjectMissing, StorageError, StorageTimeout
from checkpointing.threads import in_background

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
_SEND_BYTES = 256 * 1024
_UPLOADS_PER_PAGE = 1_000
# S3 allows 10,000 parts; larger objects get larger ones.
_MAX_PARTS = 9_000
_CONNECT_TIMEOUT_S = 5
# Longest silence on a connection. A slow link is not silent.
_SILENCE_TIMEOUT_S = 15
_RETRY_FOR_S = 60.0
# Longest wait for the whole of a small answer, besides what the bytes need that were sent.
_ANSWER_WITHIN_S = 60.0
# Below this rate a call is given up, whatever trickles in.
_MIN_BYTES_PER_S = 50_000
_RETRIED_CODES = {
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "RequestTimeTooSkewed",
    "ServiceUnavailable",
    "SlowDown",
    "ThrottlingException",
    "Throttling",
}
# What every S3 server says where it has done what it was asked; a page of whatever stands before it does not.
_PROOFS = {
    "put_object": ("ETag",),
    "upload_part": ("ETag",),
    "create_multipart_upload": ("UploadId",),
    # Its ETag is empty at radosgw 16.
    "complete_multipart_upload": ("Bucket", "Key"),
    "get_object": ("ETag",),
    "list_objects_v2": ("Name", "IsTruncated"),
    "list_multipart_uploads": ("Bucket",),
}
_MENDS = {
    "InvalidAccessKeyId": "the access key is unknown there; check AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "the secret key is wrong; check AWS_SECRET_ACCESS_KEY",
    "ExpiredToken": "the credentials have expired; renew them",
    "NoSuchBucket": "the bucket does not exist; create it, or check the name",
    "AccessDenied": "these credentials may not do this; allow list, get, put and delete under the prefix",
    "AllAccessDisabled": "these credentials may not do this; allow list, get, put and delete under the prefix",
    "QuotaExceeded": "the quota is used up; raise it, or keep fewer checkpoints",
    "RequestTimeTooSkewed": "this machine's clock is wrong; set it",
}

T = TypeVar("T")


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
            self._client.meta.events.register_first("before-sign.s3", _lay_body_aside)
            self._client.meta.events.register_last("request-created.s3", _take_body_up)
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
            self._call("put_object", key, nbytes=len(data), Body=data, ChecksumCRC32=_crc32(data), **arguments)
        except _PreconditionFailed:
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
            parts = _cut(pieces, part_bytes, stays=True)
        else:
            parts, places = _cut(one_at_a_time(), part_bytes, stays=False), _PLACES_OF_A_COPY
        first = next(parts, memoryview(b""))
        if len(first) < part_bytes:
            checksum = _crc32(first)
            self._call("put_object", key, Body=_body(first), ChecksumCRC32=checksum, nbytes=len(first), borrows=True)
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
        except _Missing:
            return None

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        def consume(answer: Any) -> None:
            if not str(answer.get("ContentRange", "")).startswith(f"bytes {start}-"):
                raise StorageTimeout(f"{self.location}/{key}: other bytes were answered than those from {start} on")
            limit_s = _RETRY_FOR_S + len(target) / _MIN_BYTES_PER_S
            with _hanging_up(answer, limit_s) as hung_up:
                view = target
                while len(view):
                    count = answer["Body"].readinto(view[:_READ_BYTES])
                    if hung_up.is_set():
                        raise StorageTimeout(f"{self.location}/{key}: less than {_MIN_BYTES_PER_S} bytes/s arrive")
                    if not count:
                        raise ObjectMissing(f"{self.location}/{key} is shorter than it was")
                    view = view[count:]

        try:
            span = f"bytes={start}-{start + len(target) - 1}"
            self._call("get_object", key, Range=span, consume=consume, nbytes=len(target), borrows=True)
            self.transferred(len(target))
        except _Missing:
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
        checksum = _crc32(part)
        answer = self._call(
            "upload_part",
            key,
            UploadId=upload_id,
            PartNumber=number,
            Body=_body(part),
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
        except (StorageTimeout, _Missing):
            # The answer may have been lost, not the call: the upload is then gone and the object there.
            if self.sizes(key).get(key) != nbytes:
                raise

    def _unfinished_uploads(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        arguments: dict[str, Any] = {"Prefix": self._prefix, "MaxUploads": _UPLOADS_PER_PAGE}
        while True:
            try:
                page = self._call("list_multipart_uploads", None, **arguments)
            except _Missing:  # rclone's way to say that there are none
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
                _check_is_s3(name, answer, what)
                return answer if consume is None else consume(answer)
            except ClientError as error:
                raise _translated(error, what) from None
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
            stop=tenacity.stop_after_delay(_RETRY_FOR_S + nbytes / _MIN_BYTES_PER_S),
            before_sleep=lambda state: self.retried(str(state.outcome and state.outcome.exception())),
            reraise=True,
        )
        if borrows:
            return retried(once)
        return retried(_within, _ANSWER_WITHIN_S + nbytes / _MIN_BYTES_PER_S, once, what)


class _Missing(StorageError):
    """No such object, or upload."""


class _PreconditionFailed(StorageError):
    """There is one already."""


class _Throttled(StorageTimeout):
    """The server asks for patience, or is ill; or what stands before it, which may have passed the call on."""


@contextlib.contextmanager
def _hanging_up(answer: Any, limit_s: float) -> Iterator[threading.Event]:
    """End the connection under who reads from it, after that time; the event says that it was.

    A read returns when it has all bytes that it was asked for, and a socket's timeout begins anew with each.
    """
    hung_up = threading.Event()

    def hang_up() -> None:
        hung_up.set()
        connection: Any = getattr(getattr(answer["Body"], "_raw_stream", None), "_connection", None)
        with contextlib.suppress(OSError, AttributeError):
            connection.sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(limit_s, hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield hung_up
    finally:
        timer.cancel()


def _within(limit_s: float, call: Callable[[], T], what: str) -> T:
    """Wait for a call no longer than that. A socket's timeout begins anew with each byte that trickles in.

    Raises:
        StorageTimeout: it is not over; a thread of its own waits on, for as long as something trickles.
    """
    outcome = in_background(call, "s3-call")
    if not wait([outcome], limit_s).done:
        raise StorageTimeout(f"{what}: timed out: no whole answer within {limit_s:.0f} s")
    return outcome.result()


def _check_is_s3(name: str, answer: dict[str, Any], what: str) -> None:
    """Whether S3 itself has answered; asked again, it may.

    Raises:
        StorageTimeout: it was something else, so what has become of the call is not known.
    """
    metadata = answer["ResponseMetadata"]
    proofs, headers = _PROOFS.get(name), metadata["HTTPHeaders"]
    if proofs is None:
        proven = metadata["HTTPStatusCode"] == 204 or bool(metadata.get("RequestId"))
    else:
        # A web server's page may have an ETag too.
        is_page = headers.get("content-type", "").startswith("text/html") and headers.get("content-length") != "0"
        proven = not is_page and all(answer.get(field) not in (None, "") for field in proofs)
    if not proven:
        raise _not_s3(answer, what)


def _not_s3(answer: dict[str, Any], what: str) -> StorageTimeout:
    metadata = answer["ResponseMetadata"]
    kind = metadata["HTTPHeaders"].get("content-type", "without a type")
    return StorageTimeout(
        f"{what}: what answered is not S3 ({metadata['HTTPStatusCode']}, {kind}); check AWS_ENDPOINT_URL, and proxies"
    )


def _translated(error: ClientError, what: str) -> StorageError:
    code = str(error.response.get("Error", {}).get("Code", ""))
    metadata = error.response.get("ResponseMetadata", {})
    status = int(metadata.get("HTTPStatusCode", 0))
    if (not code or code.isdecimal()) and not metadata.get("RequestId"):
        # No error of S3's: neither its code nor its number for the call.
        return _Throttled(str(_not_s3(error.response, what)))
    message = error.response.get("Error", {}).get("Message") or code or "no reason given"
    text = f"{what}: {_MENDS.get(code, message)} ({status} {code})"
    if status == 412 or code == "PreconditionFailed":
        return _PreconditionFailed(text)
    if code in ("NoSuchKey", "NoSuchUpload") or (status == 404 and code in ("404", "NotFound")):
        return _Missing(text)
    if code in _RETRIED_CODES or status in (429, 500, 502, 503, 504):
        return _Throttled(text)
    return StorageError(text)


def _crc32(data: bytes | memoryview) -> str:
    # By the processor's own instructions; zlib's takes as long as sending does.
    return base64.b64encode(isal_zlib.crc32(data).to_bytes(4, "big")).decode()


class _Body:
    """Bytes to be sent, piece by piece: a socket's timeout is for one call of `sendall`, however long that is."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def __len__(self) -> int:
        return len(self._view)

    def __iter__(self) -> Iterator[memoryview]:
        deadline = time.monotonic() + _RETRY_FOR_S + len(self) / _MIN_BYTES_PER_S
        for start in range(0, len(self), _SEND_BYTES):
            if time.monotonic() > deadline:
                raise StorageTimeout(f"less than {_MIN_BYTES_PER_S} bytes/s are taken")
            yield self._view[start : start + _SEND_BYTES]


def _lay_body_aside(request: Any, **_: Any) -> None:
    """A payload that is not signed: where `awscrt` is installed, botocore wants a file or bytes all the same."""
    if isinstance(request.data, _Body):
        request.context["unsigned_body"], request.data = request.data, b""


def _take_body_up(request: Any, **_: Any) -> None:
    request.data = request.context.pop("unsigned_body", request.data)


def _body(view: memoryview) -> _Body | bytes:
    return _Body(view) if len(view) else b""


def _cut(pieces: Iterable[memoryview], part_bytes: int, *, stays: bool) -> Iterator[memoryview]:
    """Parts of `part_bytes`, but for the last; without a copy where they lie within one piece.

    Args:
        stays: a piece is still there when the next one is asked for.
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
        # The number of parts is limited; a piece of many is cut into larger ones.
        size = max(part_bytes, -(-len(rest) // _MAX_PARTS))
        while len(rest) >= size:
            yield rest[:size]
            rest = rest[size:]
        pending = rest if stays else bytearray(rest)
    if pending:
        yield memoryview(pending)
