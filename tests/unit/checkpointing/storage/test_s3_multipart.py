"""How an object is cut and uploaded, without a server."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from checkpointing.storage import s3_multipart
from checkpointing.storage.object_store import StorageError, StorageTimeout
from checkpointing.storage.s3_client import Missing, S3Client
from checkpointing.storage.s3_multipart import Uploads, cut, equal_parts

MIB = 1 << 20


class Calls(S3Client):
    """Answers as S3 does, from memory."""

    def __init__(self) -> None:
        self.location, self.prefix = "s3://bucket/run", "run/"
        self.made: list[tuple[str, str | None]] = []
        self.objects: dict[str, bytes] = {}
        self.parts: dict[int, bytes] = {}
        self.fail: Callable[[str, dict[str, Any]], None] = lambda name, arguments: None
        self.unfinished: list[dict[str, Any]] = []

    def call(self, name: str, key: str | None, **arguments: Any) -> Any:
        self.made.append((name, key))
        self.fail(name, arguments)
        match name:
            case "put_object":
                self.objects[str(key)] = b"".join(arguments["Body"])
            case "create_multipart_upload":
                return {"UploadId": "1"}
            case "upload_part":
                self.parts[arguments["PartNumber"]] = b"".join(arguments["Body"])
                return {"ETag": f"e{arguments['PartNumber']}"}
            case "complete_multipart_upload":
                numbers = [part["PartNumber"] for part in arguments["MultipartUpload"]["Parts"]]
                self.objects[str(key)] = b"".join(self.parts[number] for number in numbers)
            case "list_multipart_uploads":
                return {"Uploads": self.unfinished}
        return {}

    def names(self) -> list[str]:
        return [name for name, _ in self.made]


class AtOnce(ThreadPoolExecutor):
    """Does it in the calling thread."""

    def submit(self, call: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def sent() -> list[int]:
    return []


@pytest.fixture
def uploads(calls: Calls, sent: list[int], monkeypatch: pytest.MonkeyPatch) -> Uploads:
    monkeypatch.setattr(s3_multipart, "_PART_BYTES", 8)
    monkeypatch.setattr(s3_multipart, "_STRIPE_BYTES", 2)
    monkeypatch.setattr(s3_multipart, "_LEAST_PART_BYTES", 4)

    def size_of(key: str) -> int | None:
        return len(calls.objects[key]) if key in calls.objects else None

    return Uploads(calls, AtOnce(), transferred=sent.append, size_of=size_of)


@pytest.mark.parametrize(
    ("nbytes", "part_bytes"),
    [(0, 32 * MIB), (32 * MIB, 32 * MIB), (33 * MIB, 20 * MIB), (64 * MIB, 32 * MIB), (100 * MIB, 28 * MIB)],
)
def test_parts_are_as_equal_as_whole_stripes_can_be(nbytes: int, part_bytes: int) -> None:
    assert equal_parts(nbytes) == part_bytes


def test_a_small_object_is_put_at_once(uploads: Uploads, calls: Calls, sent: list[int]) -> None:
    assert uploads.upload("a", [memoryview(b"1234567")]) == 7
    assert (calls.names(), calls.objects, sent) == (["put_object"], {"a": b"1234567"}, [7])


@pytest.mark.parametrize("ready", [True, False])
def test_a_large_object_arrives_in_order(ready: bool, uploads: Uploads, calls: Calls, sent: list[int]) -> None:
    data = bytes(range(30))
    pieces = [memoryview(data[start : start + 3]) for start in range(0, 30, 3)]
    assert uploads.upload("a", pieces if ready else iter(pieces)) == 30
    assert calls.objects == {"a": data} and sum(sent) == 30 and len(sent) == 4


@pytest.mark.parametrize("ready", [True, False])
def test_an_object_of_very_many_parts_gets_larger_ones(
    ready: bool, uploads: Uploads, calls: Calls, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is read piece by piece, as from a local tier."""
    monkeypatch.setattr(s3_multipart, "_MAX_PARTS", 3)
    data = bytes(range(90))
    pieces = [memoryview(data[start : start + 3]) for start in range(0, 90, 3)]
    assert uploads.upload("a", pieces if ready else iter(pieces), 90) == 90
    assert calls.objects == {"a": data} and sent == [30, 30, 30]


def test_of_a_failed_upload_nothing_is_left(uploads: Uploads, calls: Calls) -> None:
    def fail(name: str, arguments: dict[str, Any]) -> None:
        if name == "upload_part" and arguments["PartNumber"] == 2:
            raise StorageError("the quota is used up")

    calls.fail = fail
    with pytest.raises(StorageError, match="quota"):
        uploads.upload("a", [memoryview(bytes(40))])
    # No part is sent once one is known to have failed.
    assert calls.names() == ["create_multipart_upload", "upload_part", "upload_part", "abort_multipart_upload"]
    calls.fail = lambda name, arguments: None
    assert uploads.upload("a", [memoryview(bytes(40))]) == 40


@pytest.mark.parametrize("error", [StorageTimeout("no answer"), Missing("no such upload")])
@pytest.mark.parametrize("arrived", [True, False])
def test_an_answer_that_was_lost(arrived: bool, error: StorageError, uploads: Uploads, calls: Calls) -> None:
    """The upload is gone and the object there, or it is not."""

    def fail(name: str, arguments: dict[str, Any]) -> None:
        if name == "complete_multipart_upload":
            calls.objects = {"a": bytes(20)} if arrived else {}
            raise error

    calls.fail = fail
    if arrived:
        assert uploads.upload("a", [memoryview(bytes(20))]) == 20
    else:
        with pytest.raises(type(error)):
            uploads.upload("a", [memoryview(bytes(20))])
        assert calls.names()[-1] == "abort_multipart_upload"


def test_unfinished_uploads_are_aborted_among_those_that_are_ours(uploads: Uploads, calls: Calls) -> None:
    calls.unfinished = [{"Key": f"run/{name}", "UploadId": name} for name in ("a", "b")]
    assert uploads.abort_unfinished(lambda key: key == "b") == 1
    assert calls.made[1:] == [("abort_multipart_upload", "b")]


@pytest.mark.parametrize(
    ("error", "passes"), [(Missing(""), True), (StorageError(""), True), (StorageTimeout(""), False)]
)
def test_where_uploads_cannot_be_listed_a_rule_of_the_bucket_ends_them(
    error: StorageError, passes: bool, uploads: Uploads, calls: Calls
) -> None:
    def fail(name: str, arguments: dict[str, Any]) -> None:
        raise error

    calls.fail = fail
    if passes:
        assert uploads.abort_unfinished(lambda key: True) == 0
    else:
        with pytest.raises(StorageTimeout):
            uploads.abort_unfinished(lambda key: True)


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("lengths", [[], [3], [8], [20], [3, 3, 3, 3], [10, 1, 10], [1] * 17])
def test_parts_are_the_same_bytes_in_order(lengths: list[int], stays: bool) -> None:
    data = bytes(range(sum(lengths)))
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    buffer = bytearray(max(lengths, default=0))

    def pieces() -> object:
        for start, length in zip(starts, lengths, strict=True):
            if stays:
                yield memoryview(data)[start : start + length]
            else:
                # The next piece is written over this one.
                buffer[:length] = data[start : start + length]
                yield memoryview(buffer)[:length]

    parts = [bytes(part) for part in cut(pieces(), 8, stays=stays)]  # type: ignore[arg-type]
    assert b"".join(parts) == data
    assert all(len(part) == 8 for part in parts[:-1])
