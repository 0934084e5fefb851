"""The digest that guards every checkpoint file, and the sum that guards the copy into an arena.

The digest is XXH3-128 (https://github.com/Cyan4973/xxHash): memory speed, and every single-bit flip and truncation
changes it. It detects faults of disks, networks and software, not forgery. Files are digested in parts of 32 MiB: a
file's digest is that of its parts' digests, concatenated. Several threads, or the ranks of a node, can each take a
share of the parts.

The sum says whether what arrived in an arena is what was captured: each rank sums the source of what it copies,
wherever that is, as 64-bit words, and the agent sums the arena. Any change of a single word changes it. Digests would
be stronger, but an accelerator has none, and they cannot be put together from shares.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

ALGORITHM = "xxh3_128_32m"
# One digest over the whole file: for the manifest itself, and for checkpoints of older versions.
PLAIN = "xxh3_128"
PART_BYTES = 32 * 1024 * 1024
_CHUNK_BYTES = 16 * 1024 * 1024
# Of what is summed.
WORD_BYTES = 8
_MODULUS = 1 << 64


def chunks(buffer: memoryview, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[memoryview]:
    """Cut a buffer into consecutive views of at most `chunk_bytes` bytes, without copying."""
    for start in range(0, len(buffer), chunk_bytes):
        yield buffer[start : start + chunk_bytes]


def algorithm_of(digest: str) -> str:
    """Return the algorithm that computed a recorded digest; raises ValueError where this release does not know it."""
    name = digest.partition(":")[0]
    if name not in (ALGORITHM, PLAIN):
        raise ValueError(f"digest {digest[:60]!r} is of an algorithm that this release does not know")
    return name


class RunningDigest:
    """A digest of bytes that arrive piece by piece."""

    def __init__(self, algorithm: str = ALGORITHM) -> None:
        self._algorithm = algorithm
        self._state, self._parts = xxhash.xxh3_128(), xxhash.xxh3_128()
        # Bytes of the current part so far.
        self._begun = 0

    def update(self, piece: memoryview) -> None:
        """Add bytes."""
        for chunk in chunks(piece):
            if self._algorithm == PLAIN:
                self._state.update(chunk)
                continue
            while len(chunk):
                taken = chunk[: PART_BYTES - self._begun]
                self._state.update(taken)
                self._begun += len(taken)
                chunk = chunk[len(taken) :]
                if self._begun == PART_BYTES:
                    self._end_part()

    def result(self) -> str:
        """Return the digest as `algorithm:hex`; nothing can be added afterwards."""
        if self._algorithm == PLAIN:
            return f"{PLAIN}:{self._state.hexdigest()}"
        if self._begun:
            self._end_part()
        return f"{ALGORITHM}:{self._parts.hexdigest()}"

    def _end_part(self) -> None:
        self._parts.update(self._state.digest())
        self._state, self._begun = xxhash.xxh3_128(), 0


def num_parts(nbytes: int) -> int:
    """Return the number of parts of a file of `nbytes` bytes."""
    return -(-nbytes // PART_BYTES)


def part_digests(buffer: memoryview, numbers: Iterable[int], num_threads: int = 1) -> dict[int, bytes]:
    """Return the digests of some of a file's parts, by number."""

    def digest(number: int) -> tuple[int, bytes]:
        # The call releases the interpreter lock.
        return number, xxhash.xxh3_128_digest(buffer[number * PART_BYTES : (number + 1) * PART_BYTES])

    if num_threads == 1:
        # Most files are small, and a thread for each of every snapshot would take longer than they do.
        return dict(map(digest, numbers))
    with ThreadPoolExecutor(num_threads, "checkpoint-digest") as pool:
        return dict(pool.map(digest, numbers))


def digest_of_parts(parts: Iterable[bytes]) -> str:
    """Return a file's digest, given those of its parts in order."""
    return f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(b''.join(parts))}"


def digesting(pieces: Iterable[memoryview], digest: RunningDigest) -> Iterator[memoryview]:
    """Yield the same pieces, and add each to the digest first."""
    for piece in pieces:
        digest.update(piece)
        yield piece


def digest_buffer(buffer: memoryview | bytes, algorithm: str = ALGORITHM) -> str:
    """Return the digest of the bytes as `algorithm:hex`."""
    digest = RunningDigest(algorithm)
    digest.update(memoryview(buffer))
    return digest.result()


def digest_file(path: Path, algorithm: str = ALGORITHM) -> str:
    """Return the digest of a file's bytes as `algorithm:hex`; raises OSError where it cannot be read."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return digest_buffer(b"", algorithm)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            return digest_buffer(view, algorithm)


def word_sum(data: memoryview | bytes, offset: int = 0) -> int:
    """Return the sum of bytes as little-endian words, modulo 2 ** 64; sums of the parts of a buffer add up to its own.

    Args:
        data: The bytes.
        offset: Where they begin in a buffer whose words are counted from its first byte.
    """
    # Only where it is used: the agent starts without it.
    import numpy as np

    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    head = min(-offset % WORD_BYTES, len(view))
    total = int.from_bytes(bytes(offset % WORD_BYTES) + bytes(view[:head]), "little")
    body = view[head:]
    whole = len(body) // WORD_BYTES * WORD_BYTES
    for begin in range(0, whole, PART_BYTES):
        words = np.frombuffer(body[begin : min(begin + PART_BYTES, whole)], "<u8")
        total += int(np.add.reduce(words, dtype=np.uint64))
    return (total + int.from_bytes(body[whole:], "little")) % _MODULUS


def added(sums: list[int]) -> int:
    """Return the sum of sums, modulo 2 ** 64."""
    return sum(sums) % _MODULUS
