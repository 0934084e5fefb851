"""What the agent keeps beside the checkpoints for a supervisor, while storage comes and goes."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from checkpointing.protocol import Message
from checkpointing.storage import LocalStorage
from checkpointing.tiers import open_tiers
from checkpointing.writer import Writer


def test_what_storage_refuses_is_kept_when_it_is_back(tmp_path: Path) -> None:
    """Of a journal that grows, each chunk as it was last; none is left out."""
    tiers, told = open_tiers(str(tmp_path / "store")), queue.SimpleQueue[Message]()
    writer = Writer(tiers, lambda message, arena: told.put(message), commits=True, local_keep_last=2)
    writer.start()
    journal = tmp_path / "journal"
    journal.write_bytes(b"0123456789")
    (tmp_path / "store").mkdir()
    away = tmp_path / "store" / ".records"
    away.touch()
    for name, start, end in (("a", 0, 3), ("a", 0, 4), ("b", 4, 6)):
        writer.record(name, str(journal), start, end)
        assert told.get(timeout=60)["event"] == "note_failed"
    away.unlink()
    writer.record("b", str(journal), 4, 9)
    writer.close()
    assert {name: tiers.durable.read_record(name) for name in tiers.durable.records()} == {"a": b"0123", "b": b"45678"}
    assert told.empty()


def test_what_waits_is_kept_as_it_was_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is slow is not given what is out of date."""
    written: list[bytes] = []
    monkeypatch.setattr(LocalStorage, "write_record", lambda self, name, data: written.append(data))
    writer = Writer(open_tiers(str(tmp_path / "store")), lambda message, arena: None, commits=True, local_keep_last=2)
    journal = tmp_path / "journal"
    journal.write_bytes(b"0123456789")
    for end in (1, 2, 3):
        writer.record("a", str(journal), 0, end)
    writer.start()
    writer.close()
    assert written == [b"012"]
