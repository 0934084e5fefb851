from __future__ import annotations

import gc
import io
import os
from pathlib import Path

import psutil
import pytest

from checkpointing.digest import digest_buffer
from checkpointing.reading import MemoryFile, private_memory, read_private, read_shared

SIZES = [0, 1, 100, 8 * 2**20, 8 * 2**20 + 1, 50_000_001]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("read", [read_private, read_shared])
def test_bytes_and_digest_of_files_and_buffers(read: object, nbytes: int, tmp_path: Path) -> None:
    data = os.urandom(nbytes)
    (tmp_path / "f").write_bytes(data)
    for source in (tmp_path / "f", memoryview(bytearray(data))):
        view, digest = read(source)  # type: ignore[operator]
        assert bytes(view) == data and digest == digest_buffer(data)


def test_private_bytes_are_ones_own(tmp_path: Path) -> None:
    source = memoryview(bytearray(b"abc"))
    view, _ = read_private(source)
    view[0] = 0
    assert bytes(source) == b"abc"


def test_a_memory_file_reads_and_seeks_like_a_file() -> None:
    data = os.urandom(1000)
    ours, theirs = io.BufferedReader(MemoryFile(memoryview(data))), io.BytesIO(data)
    for offset, origin, count in ((10, 0, 5), (-20, 2, 100), (-7, 1, 3), (5000, 0, 1), (0, 0, -1)):
        assert ours.seek(offset, origin) == theirs.seek(offset, origin)
        assert ours.read(count) == theirs.read(count)


@pytest.mark.parametrize("num_pieces", [0, 1, 3])
def test_memory_is_made_until_it_is_enough(num_pieces: int) -> None:
    """The missing memory is allocated when it is first used."""
    # Garbage that is freed in between would distort the measurement.
    gc.collect()
    nbytes, answers, before = 160 << 20, iter([False] * num_pieces + [True] * 3), resident()
    memory = private_memory(nbytes, enough=lambda: next(answers))
    assert abs(resident() - before - min(num_pieces * (64 << 20), nbytes)) < 16 << 20
    memory[-1] = memory[0] = 1
    assert len(memory) == nbytes


def resident() -> int:
    return psutil.Process().memory_info().rss
