"""What the nodes of a save tell each other: waiting for a note, signs of life, and errors."""

from __future__ import annotations

import json
import time

import pytest
from chaos.stores import MemoryObjects

from checkpointing.commit import save_notes
from checkpointing.commit.save_notes import SignsOfLife, await_note, error_in
from checkpointing.storage.object_storage import ObjectStorage, ObjectTransaction


@pytest.fixture
def transaction() -> ObjectTransaction:
    return ObjectStorage(MemoryObjects()).begin(7, 1, "ab")


def test_a_note_that_comes_is_returned_at_once(transaction: ObjectTransaction) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            transaction.write_note("note", b"here")

    assert await_note(transaction, "note", 60.0, lambda: sum(slept), sleep) == b"here"
    assert slept == [0.02, 0.04, 0.08]


def test_a_note_that_never_comes_is_looked_for_ever_more_seldom(transaction: ObjectTransaction) -> None:
    slept: list[float] = []
    assert await_note(transaction, "note", 5.0, lambda: sum(slept), slept.append) is None
    assert max(slept) == 0.5 and 5.0 < sum(slept) <= 5.5


def test_signs_of_life_differ_and_end(transaction: ObjectTransaction, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_notes, "ALIVE_S", 0.001)
    signs = SignsOfLife(transaction, "note")
    seen: set[bytes] = set()
    deadline = time.monotonic() + 60
    while len(seen) < 3 and time.monotonic() < deadline:
        note = transaction.read_note("note")
        seen |= {note} if note is not None else set()
    signs.end()
    last = transaction.read_note("note")
    assert len(seen) >= 3 and last is not None and error_in(last) is None
    signs.end("disk full")
    last = transaction.read_note("note")
    assert last is not None and error_in(last) == "disk full"


@pytest.mark.parametrize("note", [b"", b"[1]", b"{", b'{"alive": [1, 2]}', json.dumps({"files": {}}).encode()])
def test_anything_else_is_no_error(note: bytes) -> None:
    assert error_in(note) is None
