"""Bodies, parts and deadlines of S3 calls."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from checkpointing.storage import s3_transport
from checkpointing.storage.object_store import StorageTimeout
from checkpointing.storage.s3_transport import body, crc32, cut, deadline_s, lay_body_aside, take_body_up, within


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


def test_a_body_is_sent_piece_by_piece_until_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_transport, "_SEND_BYTES", 4)
    view = memoryview(b"0123456789")
    assert list(body(view)) == [b"0123", b"4567", b"89"]
    assert body(memoryview(b"")) == b""
    monkeypatch.setattr(s3_transport, "_RETRY_FOR_S", -1.0)
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
