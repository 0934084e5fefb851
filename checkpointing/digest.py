"""The digest that guards every checkpoint file.

XXH3-128 (https://github.com/Cyan4973/xxHash): memory speed, and every single-bit flip and truncation changes it. It
guards against faults of disks, networks and software, not against forgery.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

ALGORITHM = "xxh3_128"
_CHUNK_BYTES = 16 * 1024 * 1024


def chunks(buffer: memoryview, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[memoryview]:
    """Cut a buffer into consecutive views of at most `chunk_bytes` bytes, without copying."""
    for start in range(0, len(buffer), chunk_bytes):
        yield buffer[start : start + chunk_bytes]


class RunningDigest:
    """A digest of bytes that come piece by piece."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, piece: memoryview) -> None:
        for chunk in chunks(piece):
            self._state.update(chunk)

    def result(self) -> str:
        return f"{ALGORITHM}:{self._state.hexdigest()}"


def digesting(pieces: Iterable[memoryview], digest: RunningDigest) -> Iterator[memoryview]:
    """The same pieces, each taken into the digest as it is handed on."""
    for piece in pieces:
        digest.update(piece)
        yield piece


def digest_buffer(buffer: memoryview | bytes) -> str:
    """Digest of the bytes, as `algorithm:hex`."""
    digest = RunningDigest()
    digest.update(memoryview(buffer))
    return digest.result()


def digest_file(path: Path) -> str:
    """Digest of a file's bytes, as `algorithm:hex`.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return digest_buffer(b"")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            return digest_buffer(view)
