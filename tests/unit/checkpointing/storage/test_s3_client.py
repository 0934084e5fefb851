"""One call to S3: which errors are retried, and when the client gives up."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ConnectionClosedError, NoCredentialsError, ParamValidationError

from checkpointing.storage.object_store import StorageError, StorageTimeout
from checkpointing.storage.s3_client import S3Client


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
