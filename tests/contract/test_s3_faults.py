"""Object storage behind a bad network: what is retried, what fails and how, and what is stored afterwards."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest
from contract.support import LARGE_BYTES, assert_good_order, assert_is_what_was_written, commit
from helpers.servers import (
    ANSWER_HALVED,
    ANSWER_LOST,
    ANSWER_TRICKLES,
    Fault,
    FaultProxy,
    MeddlingProxy,
    Server,
    bucket_on,
    fault_proxy,
    meddling_proxy,
)
from infra.parts import needs

from checkpointing.errors import CommitFailed
from checkpointing.storage import open_storage, s3, s3_client, s3_multipart
from checkpointing.storage.object_storage import ObjectStorage
from checkpointing.storage.object_store import ObjectStore, StorageError, StorageTimeout

# More than the buffers between here and there take at once: sending it waits for the line.
LONG_BYTES = 16 << 20
PUT_MANIFEST = "PUT .*/manifest.json"
CREATE_UPLOAD, COMPLETE_UPLOAD = r"POST .*\?uploads", "POST .*uploadId="
CONNECTION_LOST = Fault()
BUSY = Fault(status=503, code="SlowDown")
ILL = Fault(status=500, code="InternalError")
REVOKED = Fault(status=403, code="AccessDenied")
# What stands before the server has pages of its own; one that is well-formed passes for an answer without content.
PAGE = Fault(status=200, body="<html><body>Maintenance</body></html>")
PAGE_404 = Fault(status=404, body="<html><body>Not Found</body></html>")


@dataclass
class Place:
    """A location on a server, and the proxy in front of it."""

    location: str
    proxy: MeddlingProxy

    def open(self) -> ObjectStorage:
        storage = open_storage(self.location)
        assert isinstance(storage, ObjectStorage)
        return storage


@pytest.fixture(params=["rclone", "radosgw"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """On a server that ignores `If-None-Match`, and on one that does not."""
    with meddling_proxy(request.getfixturevalue(f"{request.param}_s3")) as proxy:
        yield Place(f"s3://{bucket_on(proxy, monkeypatch)}/run", proxy)


@pytest.fixture
def line(rclone_s3: Server) -> Iterator[FaultProxy]:
    with fault_proxy(rclone_s3) as proxy:
        yield proxy


@contextlib.contextmanager
def impatient(answer_within_s: float = 30) -> Iterator[None]:
    """What fails is tried again for a moment only; a store that is opened here thinks a line dead after a second
    without a sound."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3_client, "_RETRY_FOR_S", 0.3)
        patch.setattr(s3_client, "_ANSWER_WITHIN_S", answer_within_s)
        patch.setattr(s3_client, "MIN_BYTES_PER_S", 1 << 30)
        patch.setattr(s3_client, "_CONNECT_TIMEOUT_S", 1)
        patch.setattr(s3_client, "_SILENCE_TIMEOUT_S", 1)
        yield


# -- what passes by itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_like", "fault"),
    [
        (".*", BUSY),
        (".*", ILL),
        (".*", CONNECTION_LOST),
        ("PUT .*partNumber=", Fault(body_bytes=3 << 20)),
        ("PUT .*partNumber=", ANSWER_LOST),
        (CREATE_UPLOAD, ANSWER_LOST),
        # An error that occurred after the answer had begun.
        (COMPLETE_UPLOAD, Fault(status=200, code="InternalError")),
        ("GET .*list-type=2", ANSWER_HALVED),
        ("GET .*/model", ANSWER_HALVED),
        (".*", Fault(status=502, body="<html><body>Bad Gateway<br></html>")),
        ("GET .*list-type=2", Fault(status=200, body="<html><body>Maintenance<br></html>")),
        *[(call, PAGE) for call in ("PUT .*partNumber=", CREATE_UPLOAD, COMPLETE_UPLOAD, PUT_MANIFEST)],
        *[(call, PAGE) for call in ("GET .*list-type=2", "GET .*/manifest.json", "GET .*/model")],
        (COMPLETE_UPLOAD, Fault(carried_out=True, status=200, body=PAGE.body)),
        ("GET .*/manifest.json", PAGE_404),
        # A number that is none: well-formed, but it cannot be parsed.
        ("GET .*list-type=2", Fault(carried_out=True, damage=lambda data: data.replace(b"MaxKeys>1", b"MaxKeys>x"))),
    ],
)
@pytest.mark.parametrize("place", ["rclone"], indirect=True)
def test_a_few_faults_pass_unnoticed(request_like: str, fault: Fault, place: Place) -> None:
    rule = place.proxy.add(request_like, fault, times=3)
    storage = place.open()
    told: list[str] = []
    storage.watch_retries(told.append)
    assert_is_what_was_written(storage, commit(storage, 1, nbytes=LARGE_BYTES))
    assert rule.hits == 3, "it was not put to the test"
    # rclone answers 500 on its own now and then, on a busy machine; that is reported as well.
    assert len(told) == 3 + len(place.proxy.own_errors) and all(place.location in reason for reason in told)


def test_nothing_is_written_twice(place: Place) -> None:
    """No server's answer is taken for something else: radosgw 16 leaves the ETag of a whole upload empty."""
    storage = place.open()
    storage.begin_attempt(1)
    before = len(place.proxy.seen)
    told: list[str] = []
    storage.watch_retries(told.append)
    commit(storage, 1, nbytes=LARGE_BYTES)
    writes = [request for request in place.proxy.seen[before:] if request.startswith(("PUT", "POST"))]
    assert sorted(writes) == sorted({*writes}) and not told, "something was tried again"


def test_an_upload_that_is_complete_counts_whatever_was_answered(place: Place) -> None:
    """Asked again, the server knows of no such upload."""
    rule = place.proxy.add(COMPLETE_UPLOAD, ANSWER_LOST, times=3)
    storage = place.open()
    assert_is_what_was_written(storage, commit(storage, 1, nbytes=LARGE_BYTES))
    assert rule.hits == 3
    assert_good_order(place.location, [1])


@pytest.mark.parametrize("server", ["rclone_s3", "radosgw_s3"])
def test_more_unfinished_uploads_than_one_answer_lists(
    server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, client = bucket_on(request.getfixturevalue(server), monkeypatch), boto3.client("s3")
    for key in ("run/a", "run/a", "run/a", "run/b", "run/c", "other/a"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    monkeypatch.setattr(s3_multipart, "_UPLOADS_PER_PAGE", 2)
    store = s3.S3Store(f"s3://{bucket}/run")
    assert store.abort_uploads(lambda key: key == "c") == 1
    assert store.abort_uploads() == 4
    assert [upload["Key"] for upload in client.list_multipart_uploads(Bucket=bucket)["Uploads"]] == ["other/a"]


def test_a_sweep_leaves_alone_what_others_upload_below(rclone_s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, client = bucket_on(rclone_s3, monkeypatch), boto3.client("s3")
    others = ["run-2/checkpoint-5/7.abcdef/model.safetensors", "data/big.tar", "checkpoint-5/notes.txt"]
    for key in ("checkpoint-5/1.abcdef/model.safetensors", *others):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    open_storage(f"s3://{bucket}").sweep()
    left = [upload["Key"] for upload in client.list_multipart_uploads(Bucket=bucket)["Uploads"]]
    assert sorted(left) == sorted(others)


@pytest.mark.parametrize("name", ["s3://", "s3://my bucket/run"])
def test_a_name_that_cannot_be_is_told_at_once(name: str, rclone_s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket_on(rclone_s3, monkeypatch)
    with pytest.raises((ValueError, StorageError), match=r"names no bucket|name is not allowed"):
        open_storage(name).probe()


@pytest.mark.parametrize("faults", [{"http503": 3}, {"http503": 3, "match": "PUT"}, {"latency_ms": 20}])
def test_a_bad_line_is_put_up_with(
    faults: dict[str, object], line: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(f"s3://{bucket_on(line, monkeypatch)}/run")
    line.set(**faults)
    assert_is_what_was_written(storage, commit(storage, 1))
    assert line.traffic.busy == faults.get("http503", 0)


# Up, 10 MB may be in buffers when all is sent, and the answer comes when they are empty; down, all is one piece.
@pytest.mark.parametrize(
    ("way", "nbytes", "rate_bps"),
    [("up", 40 << 20, 2.5e6), pytest.param("down", 16 << 20, 5e5, marks=pytest.mark.soak)],
)
def test_a_slow_line_is_not_a_silent_one(
    way: str, nbytes: int, rate_bps: float, line: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part takes longer than either time-out, but something always moves; what is on its way is not sent again."""
    monkeypatch.setattr(s3_multipart, "_PART_BYTES", nbytes)
    # Less than the 16 s that a part takes, and 8 s more than anything is still where everybody works.
    monkeypatch.setattr(s3_client, "_CONNECT_TIMEOUT_S", 12)
    monkeypatch.setattr(s3_client, "_SILENCE_TIMEOUT_S", 12)
    storage = open_storage(f"s3://{bucket_on(line, monkeypatch)}/run")
    if way == "up":
        line.set(rate_bps=rate_bps)
    manifest = commit(storage, 1, nbytes=nbytes)
    line.set(**({"rate_bps": rate_bps} if way == "down" else {}))
    assert_is_what_was_written(storage, manifest)
    assert getattr(line.traffic, way) < 1.5 * manifest.total_bytes


# -- what does not -------------------------------------------------------------------------------------------------


def test_a_line_that_always_breaks_fails_the_save_and_leaves_nothing(
    radosgw_s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fault_proxy(radosgw_s3) as line:
        location = f"s3://{bucket_on(line, monkeypatch)}/run"
        storage = open_storage(location)
        commit(storage, 1)
        # Enough for what is small, too little for a part.
        line.set(cut_after=3 << 20)
        with impatient(), pytest.raises(CommitFailed, match="could not be written"):
            commit(storage, 2, nbytes=LARGE_BYTES)
        assert line.traffic.cut > 0
        line.set()
        assert storage.steps() == [1]
        assert_good_order(location, [1])


def upload(store: ObjectStore) -> None:
    store.upload("x", [memoryview(bytes(LONG_BYTES))])


def read(store: ObjectStore) -> None:
    store.read_into("x", 0, memoryview(bytearray(LONG_BYTES)))


@pytest.mark.parametrize("call", [upload, read])
def test_a_line_that_only_trickles_is_given_up(
    call: Callable[[ObjectStore], None], line: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server never falls silent, and never finishes."""
    monkeypatch.setattr(s3_multipart, "_PART_BYTES", LONG_BYTES)
    store = s3.S3Store(f"s3://{bucket_on(line, monkeypatch)}/run")
    upload(store)
    line.set(rate_bps=3e5)
    began = time.monotonic()
    with impatient(), pytest.raises(StorageTimeout):
        call(store)
    # At that rate it would have taken 50 s.
    assert time.monotonic() - began < 45


@pytest.mark.parametrize("call", ["get", "sizes"])
@pytest.mark.parametrize("place", ["rclone"], indirect=True)
def test_a_small_answer_that_only_trickles_is_given_up(call: str, place: Place) -> None:
    """A manifest, a fence, a listing: 600 bytes and more, which is a minute."""
    storage = place.open()
    storage.begin_attempt(1)
    commit(storage, 1, nbytes=100)
    storage.store.put("x", bytes(600))
    place.proxy.add("GET .*", ANSWER_TRICKLES)
    began = time.monotonic()
    with impatient(answer_within_s=3), pytest.raises(StorageTimeout, match="no whole answer within 3 s"):
        STORAGE_CALLS[call](storage)
    assert time.monotonic() - began < 50


@pytest.mark.parametrize("place", ["rclone"], indirect=True)
def test_a_read_that_only_trickles_is_given_up(place: Place) -> None:
    """Byte by byte, for a minute: less than what is looked at at a time."""
    store = place.open().store
    store.put("x", bytes(600))
    place.proxy.add("GET .*", ANSWER_TRICKLES)
    began = time.monotonic()
    with impatient(), pytest.raises(StorageTimeout):
        store.read_into("x", 0, memoryview(bytearray(600)))
    assert time.monotonic() - began < 50


STORAGE_CALLS: dict[str, Callable[[ObjectStorage], object]] = {
    "put": lambda storage: storage.store.put("x", b"x"),
    "upload": lambda storage: storage.store.upload("x", [memoryview(b"x")]),
    "get": lambda storage: storage.store.get("x"),
    "read_into": lambda storage: storage.store.read_into("x", 0, memoryview(bytearray(9))),
    "sizes": lambda storage: storage.store.sizes(),
    "delete": lambda storage: storage.store.delete(["x", "y", "z"]),
    "abort_uploads": lambda storage: storage.store.abort_uploads(),
    "honours_if_absent": lambda storage: storage.store.honours_if_absent,
    "fence": lambda storage: storage.fence(),
    "survey": lambda storage: list(storage.survey()),
}


@pytest.mark.parametrize("fault", [PAGE, PAGE_404])
@pytest.mark.parametrize("call", STORAGE_CALLS)
@pytest.mark.parametrize("place", ["rclone"], indirect=True)
def test_a_page_of_a_proxy_is_no_answer(call: str, fault: Fault, place: Place) -> None:
    """Nothing is stored, gone or missing because something that is not S3 says 200, or 404."""
    commit(place.open(), 1, nbytes=100)
    storage = place.open()
    place.proxy.add(".*", fault)
    with impatient(), pytest.raises(StorageTimeout, match="what answered is not S3"):
        STORAGE_CALLS[call](storage)


@pytest.mark.parametrize("place", ["rclone"], indirect=True)
def test_a_save_is_not_acknowledged_by_a_page(place: Place) -> None:
    storage = place.open()
    commit(storage, 1, nbytes=100)
    place.proxy.add(PUT_MANIFEST, PAGE)
    with impatient(), pytest.raises(CommitFailed, match="what answered is not S3"):
        commit(storage, 2, nbytes=100)
    place.proxy.rules.clear()
    assert storage.steps() == [1]
    assert_good_order(place.location, [1])


@pytest.fixture
def far(line: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> ObjectStorage:
    """At the other end of the line, which it soon thinks dead. What must succeed is tried for as long as ever."""
    bucket = bucket_on(line, monkeypatch)
    with impatient():
        storage = open_storage(f"s3://{bucket}/run")
    assert isinstance(storage, ObjectStorage)
    return storage


@pytest.mark.parametrize("call", STORAGE_CALLS)
def test_every_call_into_a_black_hole_ends(call: str, line: FaultProxy, far: ObjectStorage) -> None:
    far.sweep()  # a connection is open
    line.set(blackhole=True)
    began = time.monotonic()
    with impatient(), pytest.raises(StorageTimeout):
        STORAGE_CALLS[call](far)
    # `honours_if_absent` makes three calls; each would last for more than a minute without `impatient`.
    assert time.monotonic() - began < 50


def test_an_upload_that_falls_into_a_black_hole_ends(line: FaultProxy, far: ObjectStorage) -> None:
    def pieces() -> Iterator[memoryview]:
        yield memoryview(bytes(6 << 20))
        line.set(blackhole=True)
        yield memoryview(bytes(6 << 20))

    began = time.monotonic()
    with impatient(), pytest.raises(StorageTimeout):
        far.store.upload("x", pieces())
    assert time.monotonic() - began < 50


def test_a_save_into_a_black_hole_ends_and_its_parts_are_swept(line: FaultProxy, far: ObjectStorage) -> None:
    commit(far, 1, nbytes=100)

    def fall() -> bool:
        line.set(blackhole=True)
        return True

    began = time.monotonic()
    with impatient(), pytest.raises(CommitFailed, match=r"timed out|timeout"):
        commit(far, 2, nbytes=100, may_publish=fall)
    assert time.monotonic() - began < 50
    line.set()
    assert far.steps() == [1]
    assert_good_order(far.location, [1], nbytes=100)


@pytest.mark.parametrize(
    ("fault", "fix"),
    [
        (REVOKED, "these credentials may not do this; allow list, get, put and delete"),
        (Fault(status=400, code="ExpiredToken"), "the credentials have expired; renew them"),
        (Fault(status=403, code="QuotaExceeded"), "the quota is used up"),
    ],
)
def test_a_fault_that_waiting_does_not_fix_is_reported_at_once(
    fault: Fault, fix: str, radosgw_s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is refused from the second part on, including the clean-up."""
    with meddling_proxy(radosgw_s3) as proxy:
        place = Place(f"s3://{bucket_on(proxy, monkeypatch)}/run", proxy)
        storage = place.open()
        commit(storage, 1)
        before = len(proxy.seen)
        proxy.add(".*", fault, after=proxy.add("PUT .*partNumber=2", fault))
        with impatient(), pytest.raises(CommitFailed, match=fix) as caught:
            commit(storage, 2, nbytes=LARGE_BYTES)
        assert isinstance(caught.value.__cause__, StorageError)
        assert len(proxy.seen[before:]) == len({*proxy.seen[before:]}), "something was tried again"
        proxy.rules.clear()
        assert_good_order(place.location, [1])


@pytest.mark.parametrize("server", ["rclone_s3", "radosgw_s3"])
def test_a_bucket_that_is_deleted_is_named(
    server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_on(request.getfixturevalue(server), monkeypatch)
    storage = open_storage(f"s3://{bucket}/run")
    commit(storage, 1)
    client = boto3.client("s3")
    for entry in client.list_objects_v2(Bucket=bucket)["Contents"]:
        client.delete_object(Bucket=bucket, Key=entry["Key"])
    client.delete_bucket(Bucket=bucket)
    for nbytes in (100, LARGE_BYTES):
        with pytest.raises(CommitFailed, match="the bucket does not exist; create it"):
            commit(storage, 2, nbytes=nbytes)


@needs("faketime")
def test_a_wrong_clock_is_named(radosgw_s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    location = f"s3://{bucket_on(radosgw_s3, monkeypatch)}/run"
    impatient = "from checkpointing.storage import s3_client as s3; s3._RETRY_FOR_S, s3.MIN_BYTES_PER_S = 0.5, 1 << 30"
    program = f"import sys, writer; {impatient}; writer.main(*sys.argv[1:])"
    result = subprocess.run(
        ["faketime", "-f", "+1h", sys.executable, "-c", program, location, "commit:1"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stderr == "" and result.stdout.splitlines()[-1].startswith("failed commit:1"), result
    assert "this machine's clock is wrong; set it" in result.stdout


# -- the manifest --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "times"),
    [(ANSWER_LOST, 1), (ANSWER_LOST, 1000), (Fault(carried_out=True, status=500, code="InternalError"), 1000)],
)
def test_a_manifest_that_is_there_counts_whatever_was_answered(answer: Fault, times: int, place: Place) -> None:
    storage = place.open()
    storage.begin_attempt(1)
    put = place.proxy.add(PUT_MANIFEST, answer, times)
    with impatient():
        manifest = commit(storage, 1, nbytes=100)
    assert put.hits > 0
    place.proxy.rules.clear()
    assert_is_what_was_written(storage, manifest)
    assert_good_order(place.location, [1])


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (ANSWER_LOST, CONNECTION_LOST),
        (ANSWER_LOST, BUSY),
        (ANSWER_LOST, REVOKED),
        (Fault(carried_out=True, status=504, code="GatewayTimeout"), CONNECTION_LOST),
    ],
)
def test_what_a_manifest_names_that_may_be_there_is_kept(first: Fault, then: Fault, place: Place) -> None:
    """It was put, but nothing that is asked from then on is answered as it should be."""
    storage = place.open()
    storage.begin_attempt(1)
    put = place.proxy.add(PUT_MANIFEST, first, times=1)
    place.proxy.add("(PUT|GET|HEAD) .*", then, after=put)
    with impatient(), pytest.raises(CommitFailed, match="put object"):
        commit(storage, 1, nbytes=100)
    assert put.hits == 1
    place.proxy.rules.clear()
    assert_good_order(place.location, [1])
