"""A sum of bytes as 64-bit words, which several processes and devices compute in shares.

It says whether what arrived in an arena is what was captured: each rank sums the source of what it copies, wherever
that is, and the agent sums the arena. Any change of a single word changes it. Digests would be stronger, but an
accelerator has none, and they cannot be put together from shares.
"""

from __future__ import annotations

WORD_BYTES = 8
_MODULUS = 1 << 64
_CHUNK_BYTES = 32 * 1024 * 1024


def word_sum(data: memoryview | bytes, offset: int = 0) -> int:
    """Return the sum of bytes as little-endian words, modulo 2 ** 64.

    Sums of the parts of a buffer add up to that of the whole.

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
    for begin in range(0, whole, _CHUNK_BYTES):
        words = np.frombuffer(body[begin : min(begin + _CHUNK_BYTES, whole)], "<u8")
        total += int(np.add.reduce(words, dtype=np.uint64))
    return (total + int.from_bytes(body[whole:], "little")) % _MODULUS


def added(sums: list[int]) -> int:
    """Return the sum of sums, modulo 2 ** 64."""
    return sum(sums) % _MODULUS
