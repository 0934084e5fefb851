"""The supervisor's files that the agent keeps next to the checkpoints, while storage fails and recovers."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
from chaos.stores import MemoryObjects

from checkpointing.agent.events import RestartStateFailed, StorageRetried
from checkpointing.agent.reporting import Result
from checkpointing.agent.writer import Writer
from checkpointing.commit.retention import Retention
from checkpointing.commit.tiers import Tiers, open_tiers
from checkpointing.storage.object_storage import ObjectStorage
from checkpointing.storage.sidecars import LocalSidecars


def test_writes_that_storage_refused_are_repeated_when_it_is_back(tmp_path: Path) -> None:
    """Each chunk of a growing journal is stored in its newest version; none is left out."""
    tiers, told = open_tiers(str(tmp_path / "store")), queue.SimpleQueue[Result]()
    writer = Writer(tiers, lambda message, arena: told.put(message), commits=True, local_retention=Retention(2))
    writer.start()
    journal = tmp_path / "journal"
    journal.write_bytes(b"0123456789")
    (tmp_path / "store").mkdir()
    away = tmp_path / "store" / ".records"
    away.touch()
    for name, start, end, owed in (("a", 0, 3, 1), ("a", 0, 4, 1), ("b", 4, 6, 2)):
        writer.sidecars.write_part(name, journal, start, end)
        assert all(isinstance(told.get(timeout=60), RestartStateFailed) for _ in range(owed))
    away.unlink()
    writer.sidecars.write_part("b", journal, 4, 9)
    writer.close()
    assert {name: tiers.durable.sidecars.read(name) for name in tiers.durable.sidecars.sizes()} == {
        "a": b"0123",
        "b": b"45678",
    }
    assert told.empty()


class SlowObjects(MemoryObjects):
    """Every call that writes is made three times."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        self.retried("it was slow")
        self.retried("it was slow again")
        return super().put(key, data, if_absent=if_absent)


def test_all_tries_are_told_by_the_end_of_what_they_were_for(tmp_path: Path) -> None:
    told = queue.SimpleQueue[Result]()
    tiers = Tiers(ObjectStorage(SlowObjects()))
    writer = Writer(tiers, lambda message, arena: told.put(message), commits=True, local_retention=Retention(2))
    (tmp_path / "journal").write_bytes(b"0123456789")
    writer.sidecars.write_part("a", tmp_path / "journal", 0, 3)
    writer.start()
    writer.close()
    messages = [told.get() for _ in range(told.qsize())]
    assert messages == [
        StorageRetried(tier="remote", count=1, reason="it was slow"),
        StorageRetried(tier="remote", count=1, reason="it was slow again"),
    ]
    assert tiers.durable.sidecars.read("a") == b"012"


def test_what_waits_is_kept_as_it_was_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow server does not receive outdated versions."""
    written: list[bytes] = []
    monkeypatch.setattr(LocalSidecars, "write", lambda self, name, data: written.append(data))
    writer = Writer(
        open_tiers(str(tmp_path / "store")), lambda message, arena: None, commits=True, local_retention=Retention(2)
    )
    journal = tmp_path / "journal"
    journal.write_bytes(b"0123456789")
    for end in (1, 2, 3):
        writer.sidecars.write_part("a", journal, 0, end)
    writer.start()
    writer.close()
    assert written == [b"012"]
