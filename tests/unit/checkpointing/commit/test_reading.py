from __future__ import annotations

import errno
import gc
import io
import os
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from checkpointing.commit import reading
from checkpointing.commit.reading import MemoryFile, pieces_of, private_memory, read_private, read_shared
from checkpointing.errors import InvalidCheckpoint, StorageUnreachable
from checkpointing.format.digest import digest_buffer

SIZES = [0, 1, 100, reading._PIECE_BYTES, reading._PIECE_BYTES + 1, 50_000_001]


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


class OutOfOrder:
    """A file in a store, each second piece of which arrives before the one in front of it."""

    def __init__(self, data: bytes, piece_bytes: int) -> None:
        self.nbytes, self._data, self._piece_bytes = len(data), data, piece_bytes
        self._arrived = [threading.Event() for _ in range(-(-len(data) // piece_bytes))]

    def read_into(self, start: int, target: memoryview) -> None:
        number = start // self._piece_bytes
        if number % 2 == 0 and number + 1 < len(self._arrived):
            assert self._arrived[number + 1].wait(30)
        target[:] = self._data[start : start + len(target)]
        self._arrived[number].set()


@pytest.mark.parametrize("nbytes", [1, 7, 21, 22, 200])
def test_a_window_is_read_into_again_after_its_piece_was_used(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PIECE_BYTES", 7)
    monkeypatch.setattr(reading, "_READERS", 3)
    data = os.urandom(nbytes)
    source: Any = OutOfOrder(data, 7)
    assert b"".join(bytes(piece) for piece in pieces_of(source)) == data


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.EACCES, errno.EMFILE])
def test_a_file_that_cannot_be_read_now_is_not_called_damaged(number: int) -> None:
    """Its checkpoint would be put into quarantine, and training resumed from an older one."""
    error = reading.fault("checkpoint-3", "optimizer.pt", OSError(number, os.strerror(number)))
    assert isinstance(error, StorageUnreachable)
    assert "checkpoint-3: optimizer.pt cannot be read" in str(error)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT, 0])
def test_a_file_that_is_gone_or_damaged_is(number: int) -> None:
    assert isinstance(reading.fault("checkpoint-3", "optimizer.pt", OSError(number, "why")), InvalidCheckpoint)
