"""Operations on one bucket: each retried while that may help, over within a deadline, and answered by S3 itself."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
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

from checkpointing.host.threads import in_background
from checkpointing.storage.object_store import StorageError, StorageTimeout

_CONNECT_TIMEOUT_S = 5
# Longest silence on a connection. A slow link is not silent.
_SILENCE_TIMEOUT_S = 15
# Longest wait for the whole of a small answer, besides what the bytes need that were sent.
_ANSWER_WITHIN_S = 60.0
_SEND_BYTES = 256 * 1024
_RETRY_FOR_S = 60.0
# Slower calls are given up.
MIN_BYTES_PER_S = 50_000

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

# Fields of every S3 server's answer to a successful call, which the page of a proxy in front of it lacks.
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

_FIXES = {
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


class Missing(StorageError):
    """No such object, or upload."""


class PreconditionFailed(StorageError):
    """The object exists already."""


class _Throttled(StorageTimeout):
    """The server is overloaded or failing; or a proxy in front of it is, which may have forwarded the call."""


class S3Client:
    """A client of one bucket. Thread-safe. Credentials, region and endpoint come from where AWS's tools take them.

    Args:
        location: `s3://bucket/prefix`; ValueError where it names no bucket, or AWS's settings cannot be used.
        num_connections: Connections that are kept open.
        retried: Called with the reason, from any thread, before a call is retried.

    Attributes:
        location: The URL, as the user gave it, without a slash at its end.
        prefix: What every key begins with; keys of calls are relative to it.
    """

    def __init__(self, location: str, num_connections: int, retried: Callable[[str], None]) -> None:
        import boto3

        self.location = location.rstrip("/")
        self._retried = retried
        bucket, _, prefix = location.removeprefix("s3://").rstrip("/").partition("/")
        if not bucket:
            raise ValueError(f"checkpoint.location {location!r} names no bucket; use s3://bucket/prefix")
        self._bucket, self.prefix = bucket, f"{prefix}/" if prefix else ""
        config = Config(
            connect_timeout=_CONNECT_TIMEOUT_S,
            read_timeout=_SILENCE_TIMEOUT_S,
            # Retries are made here, within a deadline.
            retries={"total_max_attempts": 1},
            max_pool_connections=num_connections,
            # It would refuse a memoryview, and so cost a copy of every part.
            parameter_validation=False,
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

    def reconnect(self) -> None:
        """Give all connections up: later calls make new ones."""
        self._client.close()

    def call(
        self,
        name: str,
        key: str | None,
        *,
        nbytes: int = 0,
        consume: Callable[[Any], Any] | None = None,
        borrows: bool = False,
        **arguments: Any,
    ) -> Any:
        """Make one call, again while that may help, and return the answer.

        Args:
            name: Name of the operation, as boto3 has it.
            key: Of the object; None where the call is about the bucket.
            nbytes: Bytes that it moves, for which its deadline is later.
            consume: Takes the answer, within the same try; what it returns is returned in its place.
            borrows: It works on the caller's memory, so it must be over when this returns, and keeps the time itself.
            **arguments: Of the operation.

        Raises:
            StorageError: S3 refused.
            StorageTimeout: There was no answer until the deadline.
        """
        if key is not None:
            arguments["Key"] = self.prefix + key
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
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                # Raised while the client parsed an answer that was damaged on its way.
                raise StorageTimeout(f"{what}: the answer makes no sense: {error}") from error

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StorageTimeout),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=10),
            stop=tenacity.stop_after_delay(deadline_s(nbytes)),
            before_sleep=lambda state: self._retried(str(state.outcome and state.outcome.exception())),
            reraise=True,
        )
        if borrows:
            return retrying(once)
        return retrying(within, _ANSWER_WITHIN_S + nbytes / MIN_BYTES_PER_S, once, what)


def check_is_s3(name: str, answer: dict[str, Any], what: str) -> None:
    """Check that S3 itself has answered the call `what` of the operation `name`; StorageTimeout where it has not.

    It is then unknown whether the call took effect; a retry may help.
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


def translated(error: ClientError, what: str) -> StorageError:
    """Return the error to raise for an answer that botocore takes for an error; StorageTimeout if a retry may help."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    metadata = error.response.get("ResponseMetadata", {})
    status = int(metadata.get("HTTPStatusCode", 0))
    if (not code or code.isdecimal()) and not metadata.get("RequestId"):
        # Not an error of S3, which has a code or a request id.
        return _Throttled(str(_not_s3(error.response, what)))
    message = error.response.get("Error", {}).get("Message") or code or "no reason given"
    text = f"{what}: {_FIXES.get(code, message)} ({status} {code})"
    if status == 412 or code == "PreconditionFailed":
        return PreconditionFailed(text)
    if code in ("NoSuchKey", "NoSuchUpload") or (status == 404 and code in ("404", "NotFound")):
        return Missing(text)
    if code in _RETRIED_CODES or status in (429, 500, 502, 503, 504):
        return _Throttled(text)
    return StorageError(text)


def deadline_s(nbytes: int) -> float:
    """Return the seconds after which a call that moves `nbytes` bytes is given up, retries included."""
    return _RETRY_FOR_S + nbytes / MIN_BYTES_PER_S


@contextlib.contextmanager
def hanging_up(answer: Any, limit_s: float) -> Iterator[threading.Event]:
    """Close the connection of an answer that is still being read after `limit_s` seconds; the event says that it was.

    A socket's timeout does not do this: it starts again with every byte that arrives.
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


def within(limit_s: float, call: Callable[[], T], what: str) -> T:
    """Make a call; one that is not over after `limit_s` seconds raises StorageTimeout, and its thread is abandoned."""
    outcome = in_background(call, "s3-call")
    if not wait([outcome], limit_s).done:
        raise StorageTimeout(f"{what}: timed out: no whole answer within {limit_s:.0f} s")
    return outcome.result()


def crc32(data: bytes | memoryview) -> str:
    """Return the checksum that S3 compares, in base 64."""
    # isal uses the processor's own instructions; zlib takes as long as sending does.
    return base64.b64encode(isal_zlib.crc32(data).to_bytes(4, "big")).decode()


class _Body:
    """Bytes to be sent piece by piece, because a socket's timeout applies to one call of `sendall` as a whole."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def __len__(self) -> int:
        return len(self._view)

    def __iter__(self) -> Iterator[memoryview]:
        deadline = time.monotonic() + deadline_s(len(self))
        for start in range(0, len(self), _SEND_BYTES):
            if time.monotonic() > deadline:
                raise StorageTimeout(f"less than {MIN_BYTES_PER_S} bytes/s are taken")
            yield self._view[start : start + _SEND_BYTES]


def lay_body_aside(request: Any, **_: Any) -> None:
    """Take the body out of a request while it is signed: with `awscrt`, botocore accepts only files and bytes."""
    if isinstance(request.data, _Body):
        request.context["unsigned_body"], request.data = request.data, b""


def take_body_up(request: Any, **_: Any) -> None:
    """Put the body back that `lay_body_aside` took out."""
    request.data = request.context.pop("unsigned_body", request.data)


def body(view: memoryview) -> _Body | bytes:
    """Return bytes as the body of a request, without a copy."""
    return _Body(view) if len(view) else b""
