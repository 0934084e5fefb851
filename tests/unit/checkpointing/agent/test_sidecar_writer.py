"""Which writes are owed while storage comes and goes."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.checkpointing.agent.doubles import Reports, Store

from checkpointing.agent.events import RestartStateFailed
from checkpointing.agent.tasks import SidecarWriter
from checkpointing.storage.object_store import StorageTimeout
from checkpointing.storage.sidecars import ObjectSidecars


class Desk:
    def __init__(self) -> None:
        self.store, self.reports = Store(), Reports()
        self.writer = SidecarWriter(ObjectSidecars(self.store), "remote", self.reports)
        self.run = self.writer.thread.run_pending


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_of_each_name_only_the_newest_that_waits_is_written(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b"0123456789")
    puts: list[str] = []
    put = desk.store.put

    def counted(key: str, data: bytes, *, if_absent: bool = False) -> bool:
        puts.append(key)
        return put(key, data, if_absent=if_absent)

    desk.store.put = counted  # type: ignore[method-assign]
    for end in (1, 2, 3):
        desk.writer.write_part("journal", tmp_path / "journal", 0, end)
        desk.writer.replace_restart_state(f'{{"attempt": {end}}}')
    desk.writer.write("stage.json", b"{}")
    desk.run()
    assert sorted(puts) == ["records/journal", "records/stage.json", "runner.json"]
    assert (desk.store.get("records/journal"), desk.store.get("runner.json")) == (b"012", b'{"attempt": 3}')


def test_what_storage_refuses_is_owed(desk: Desk) -> None:
    desk.store.refuses = "no space"
    desk.writer.write("a", b"1")
    desk.run()
    assert desk.reports.results == [RestartStateFailed(tier="remote", error="no space")]
    desk.store.refuses = None
    desk.writer.write("b", b"2")
    desk.run()
    assert desk.store.objects == {"records/a": b"1", "records/b": b"2"}
    assert len(desk.reports) == 1


def test_what_is_owed_is_tried_a_last_time(desk: Desk) -> None:
    desk.store.refuses = "no space"
    desk.writer.write("a", b"1")
    desk.run()
    desk.store.refuses = None
    desk.writer.thread.start()
    desk.writer.thread.close()
    assert desk.store.objects == {"records/a": b"1"}


def test_a_tier_that_does_not_answer_is_asked_once_per_round(desk: Desk) -> None:
    def put(key: str, data: bytes, *, if_absent: bool = False) -> bool:
        raise StorageTimeout("no answer")

    desk.store.put = put  # type: ignore[method-assign]
    for name in ("a", "b", "c"):
        desk.writer.write(name, b"1")
    desk.run()
    assert len(desk.reports) == 1


def test_what_was_written_takes_nothing_with_it_that_is_owed(desk: Desk) -> None:
    put, full = desk.store.put, {"records/b"}

    def refuse(key: str, data: bytes, *, if_absent: bool = False) -> bool:
        if key in full:
            raise OSError(28, "no space")
        return put(key, data, if_absent=if_absent)

    desk.store.put = refuse  # type: ignore[method-assign]
    for name in ("b", "a"):
        desk.writer.write(name, b"1")
    desk.run()
    assert desk.store.objects == {"records/a": b"1"}
    full.clear()
    desk.writer.write("c", b"1")
    desk.run()
    assert desk.store.objects.keys() == {"records/a", "records/b", "records/c"}


def test_a_restart_state_of_a_newer_attempt_stays(desk: Desk) -> None:
    desk.store.objects["runner.json"] = b'{"attempt": 5}'
    desk.writer.replace_restart_state('{"attempt": 4}')
    desk.run()
    assert desk.store.objects["runner.json"] == b'{"attempt": 5}'
