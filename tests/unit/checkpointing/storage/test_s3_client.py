"""One call to S3: its body and deadline, what an answer means, which errors are retried."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError, NoCredentialsError, ParamValidationError

from checkpointing.storage import s3_client
from checkpointing.storage.object_store import StorageError, StorageTimeout
from checkpointing.storage.s3_client import (
    Missing,
    PreconditionFailed,
    S3Client,
    body,
    check_is_s3,
    crc32,
    deadline_s,
    lay_body_aside,
    take_body_up,
    translated,
    within,
)


class Service:
    """Raises the given errors, one per call, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls: list[dict[str, Any]] = []

    def get_object(self, **arguments: Any) -> dict[str, Any]:
        self.calls.append(arguments)
        if self.errors:
            raise self.errors.pop(0)
        return {"ETag": "x", "ResponseMetadata": {"HTTPStatusCode": 200, "HTTPHeaders": {}}}


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)


def client_of(service: Service, retried: list[str] | None = None, location: str = "s3://b/run/") -> S3Client:
    client = S3Client(location, 4, (retried if retried is not None else []).append)
    client._client = service
    return client


def test_keys_are_below_the_prefix() -> None:
    service = Service()
    client = client_of(service)
    assert (client.location, client.prefix) == ("s3://b/run", "run/")
    client.call("get_object", "a/b")
    assert service.calls == [{"Bucket": "b", "Key": "run/a/b"}]
    whole = client_of(Service(), location="s3://b")
    assert whole.prefix == ""


def test_a_lost_connection_is_retried_and_counted() -> None:
    retried: list[str] = []
    service = Service(ConnectionClosedError(endpoint_url="http://s3"), ConnectionClosedError(endpoint_url="http://s3"))
    answer = client_of(service, retried).call("get_object", "a", borrows=True, consume=lambda answer: answer["ETag"])
    assert answer == "x" and len(service.calls) == 3
    assert len(retried) == 2 and retried[0].startswith("get object s3://b/run/a: ")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NoCredentialsError(), "set AWS_ACCESS_KEY_ID"),
        (ParamValidationError(report="bad\n name"), "name is not allowed"),
    ],
)
def test_what_a_user_must_fix_is_not_retried(error: Exception, text: str) -> None:
    service = Service(error)
    with pytest.raises(StorageError, match=text) as caught:
        client_of(service).call("get_object", "a")
    assert not isinstance(caught.value, StorageTimeout) and len(service.calls) == 1


def test_what_a_reader_refuses_is_its_own_error() -> None:
    def consume(answer: Any) -> None:
        raise StorageError("too short")

    with pytest.raises(StorageError, match="too short"):
        client_of(Service()).call("get_object", "a", consume=consume)


def test_a_location_without_a_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="names no bucket"):
        S3Client("s3:///run", 4, lambda reason: None)


def refused(code: str, status: int, request_id: str = "1") -> StorageError:
    response: Any = {
        "Error": {"Code": code, "Message": "the server's words"},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {}, "RequestId": request_id},
    }
    return translated(ClientError(response, "PutObject"), "put s3://b/k")


@pytest.mark.parametrize(
    ("code", "status", "kind", "text"),
    [
        ("NoSuchKey", 404, Missing, ""),
        ("404", 404, Missing, ""),
        ("NoSuchUpload", 404, Missing, ""),
        ("PreconditionFailed", 412, PreconditionFailed, ""),
        ("SlowDown", 503, StorageTimeout, ""),
        ("InternalError", 200, StorageTimeout, ""),
        ("Whatever", 502, StorageTimeout, ""),
        ("AccessDenied", 403, StorageError, "allow list, get, put and delete under the prefix"),
        ("NoSuchBucket", 404, StorageError, "the bucket does not exist"),
        ("Unheard", 400, StorageError, "the server's words"),
    ],
)
def test_an_error_is_one_to_retry_or_one_to_fix(code: str, status: int, kind: type, text: str) -> None:
    error = refused(code, status)
    assert type(error) is kind or (kind is StorageTimeout and isinstance(error, kind))
    assert isinstance(error, StorageTimeout) == (kind is StorageTimeout)
    assert text in str(error) and str(error).startswith("put s3://b/k: ")


def test_what_no_s3_has_answered_is_retried() -> None:
    error = refused("403", 403, request_id="")
    assert isinstance(error, StorageTimeout) and "what answered is not S3" in str(error)


def answer(headers: dict[str, str] | None = None, status: int = 200, **fields: Any) -> dict[str, Any]:
    return {**fields, "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers or {}}}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("put_object", answer(ETag="x")),
        ("list_objects_v2", answer(Name="b", IsTruncated=False)),
        ("delete_object", answer(status=204)),
    ],
)
def test_an_answer_of_s3_passes(name: str, given: dict[str, Any]) -> None:
    check_is_s3(name, given, "call")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("put_object", answer()),
        ("put_object", answer({"content-type": "text/html", "content-length": "9"}, ETag="x")),
        ("list_objects_v2", answer(Name="b")),
        ("delete_object", answer()),
    ],
)
def test_a_page_of_a_proxy_does_not(name: str, given: dict[str, Any]) -> None:
    with pytest.raises(StorageTimeout, match="what answered is not S3"):
        check_is_s3(name, given, "call")


def test_a_body_is_sent_piece_by_piece_until_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_client, "_SEND_BYTES", 4)
    view = memoryview(b"0123456789")
    assert list(body(view)) == [b"0123", b"4567", b"89"]
    assert body(memoryview(b"")) == b""
    monkeypatch.setattr(s3_client, "_RETRY_FOR_S", -1.0)
    with pytest.raises(StorageTimeout, match="bytes/s are taken"):
        list(body(view))


def test_a_body_is_not_there_while_the_request_is_signed() -> None:
    whole = body(memoryview(b"data"))
    request = SimpleNamespace(data=whole, context={})
    lay_body_aside(request)
    assert request.data == b""
    take_body_up(request)
    assert request.data is whole
    other = SimpleNamespace(data=b"small", context={})
    lay_body_aside(other)
    take_body_up(other)
    assert other.data == b"small"


def test_a_call_that_does_not_end_is_left_behind() -> None:
    assert within(60.0, lambda: 7, "call") == 7
    release = threading.Event()
    with pytest.raises(StorageTimeout, match="no whole answer within 0 s"):
        within(0.01, lambda: release.wait(60), "call")
    release.set()


def test_more_bytes_may_take_longer() -> None:
    assert deadline_s(50_000_000) == deadline_s(0) + 1000


def test_the_checksum_is_the_one_that_s3_knows() -> None:
    # zlib.crc32(b"hello") is 0x3610a686.
    assert crc32(b"hello") == "NhCmhg=="
