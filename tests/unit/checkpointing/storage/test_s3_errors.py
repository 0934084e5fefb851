"""What an answer of S3 means."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from checkpointing.storage.object_store import StorageError, StorageTimeout
from checkpointing.storage.s3_errors import Missing, PreconditionFailed, check_is_s3, translated


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
