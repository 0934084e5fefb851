"""Request bodies, deadlines and parts of S3 calls."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from typing import Any, TypeVar

from isal import isal_zlib

from checkpointing.host.threads import in_background
from checkpointing.storage.object_store import StorageTimeout

_SEND_BYTES = 256 * 1024
_RETRY_FOR_S = 60.0
# Slower calls are given up.
MIN_BYTES_PER_S = 50_000
T = TypeVar("T")


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
    """Make a call that takes at most `limit_s` seconds. A socket's timeout starts again with every byte that arrives.

    Raises:
        StorageTimeout: It is not over; its thread is abandoned.
    """
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


def cut(pieces: Iterable[memoryview], part_bytes: int, *, stays: bool) -> Iterator[memoryview]:
    """Yield parts of `part_bytes` bytes, but for the last; without a copy where a part is within one piece.

    Args:
        pieces: The bytes, in order.
        part_bytes: Size of a part.
        stays: Whether a piece still exists when the next one is asked for.
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
