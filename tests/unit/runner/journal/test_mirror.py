from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
from helpers.journals import event

from checkpointing.storage import LocalStorage, open_storage
from checkpointing.storage.sidecars import LocalSidecars
from runner.errors import UsageError
from runner.journal import mirror
from runner.journal.journal import Journal, read_journal
from runner.journal.mirror import History, JournalCopy
from runner.recovery.restart_state import RestartState


def test_only_the_last_chunk_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "_CHUNK_BYTES", 100)
    storage = open_storage(str(tmp_path / "checkpoints"))
    journal = Journal(tmp_path / "journal.jsonl", lambda: 5.0)
    copy = JournalCopy(tmp_path / "journal.jsonl", "abc", "life")
    written: list[str] = []

    def keep(name: str, path: Path, start: int, end: int) -> bool:
        written.append(name)
        storage.sidecars.write(name, path.read_bytes()[start:end])
        return True

    for number in range(20):
        journal.append(event("progress", step=number), 1)
        copy.turn(float(number), keep, keeper=1)
        if number == 0:
            assert written == ["journal-abc-life.000000.jsonl"]
    copy.flush(keep)
    count = len(written)
    copy.flush(keep)
    assert len(written) == count, "nothing is new"
    # Once for each look in which it grew, and each of the chunks that were full before at most once more.
    assert written.count("journal-abc-life.000000.jsonl") == 2
    # The agent that kept them has died, and may have left some unwritten.
    copy.turn(100.0, keep, keeper=2)
    assert written[count:] == [*storage.sidecars.sizes("journal-abc-")]
    storage.sidecars.write_restart_state(RestartState(lineage="abc").to_json(1).encode())
    # Another run's, which was here before.
    storage.sidecars.write("journal-old-life.000000.jsonl", b'{"time": 1, "event": "run_started", "attempt": 0}\n')
    assert History(str(tmp_path / "checkpoints")).entries() == read_journal(tmp_path / "journal.jsonl")


def test_the_last_words_are_kept_without_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(str(tmp_path / "checkpoints"))
    journal = Journal(tmp_path / "journal.jsonl", lambda: 5.0)
    copy = JournalCopy(tmp_path / "journal.jsonl", "abc", "life")
    journal.append(event("run_ended", state="finished", exit_code=0, reason=""), 1)
    copy.finish(storage)
    assert [one.event.name for one in History(str(tmp_path / "checkpoints")).entries()] == ["run_ended"]
    # Some of the other chunks were lost.
    monkeypatch.setattr(mirror, "_CHUNK_BYTES", 100)
    for number in range(9):
        journal.append(event("progress", step=number), 1)
    copy.flush(lambda *chunk: True)
    copy.finish(storage)
    assert History(str(tmp_path / "checkpoints")).entries() == read_journal(tmp_path / "journal.jsonl")
    # A storage that refuses costs nothing but the copy.
    (tmp_path / "file").touch()
    JournalCopy(tmp_path / "journal.jsonl", "abc", "life").finish(open_storage(str(tmp_path / "file" / "below")))


def test_asked_again_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "COPY_INTERVAL_S", 0.0)
    storage = open_storage(str(tmp_path))
    storage.sidecars.write_restart_state(RestartState(lineage="abc").to_json(1).encode())
    lines = [
        f'{{"time": {number}, "event": "progress", "attempt": 1, "step": {number}}}\n'.encode() for number in range(9)
    ]
    read: list[str] = []
    read_sidecar = LocalSidecars.read

    def counted(self: LocalSidecars, name: str) -> bytes:
        read.append(name)
        return read_sidecar(self, name)

    monkeypatch.setattr(LocalSidecars, "read", counted)

    def keep(run_id: str, number: int, data: bytes) -> None:
        storage.sidecars.write(f"journal-abc-{run_id}.{number:06}.jsonl", data)

    def steps() -> list[int]:
        read.clear()
        return [int(one.event.to_dict()["step"]) for one in looks.entries()]

    looks = History(str(tmp_path))
    keep("old", 0, lines[0] + lines[1])
    keep("new", 0, lines[2] + lines[3][:9])
    assert steps() == [0, 1, 2]
    assert steps() == [0, 1, 2] and read == []
    # The last chunk grows, and there is a next one.
    keep("new", 0, lines[2] + lines[3] + lines[4][:5])
    keep("new", 1, lines[4][5:])
    assert steps() == [0, 1, 2, 3, 4] and len(read) == 2
    keep("new", 1, lines[4][5:] + lines[5])
    assert steps() == [0, 1, 2, 3, 4, 5] and read == ["journal-abc-new.000001.jsonl"]
    # One that storage had refused comes late: then all of that life are read.
    keep("new", 3, lines[8])
    assert steps()[-1] == 8 and len(read) == 1
    keep("new", 2, lines[6] + lines[7])
    assert steps() == [*range(9)] and len(read) == 4
    # A new journal in its place is shorter.
    keep("new", 3, b"")
    assert steps() == [*range(8)] and len(read) == 3


def test_storage_that_is_away_hides_no_life_that_was_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the run's own journal at hand, what was read of other sessions still counts."""
    monkeypatch.setattr(mirror, "COPY_INTERVAL_S", 0.0)
    place = tmp_path / "volume"
    storage = open_storage(str(place))
    storage.probe()
    storage.sidecars.write_restart_state(RestartState(lineage="abc").to_json(1).encode())
    storage.sidecars.write("journal-abc-old.000000.jsonl", b'{"time": 1, "event": "run_started", "attempt": 0}\n')
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(f"output_dir: {run}\ncheckpoint:\n  location: {place}\n")
    journal = Journal(run / "journal.jsonl", lambda: 5.0)
    journal.append(event("run_started", run_id="new"), 0)
    looks = History(str(run))
    assert [one.time for one in looks.entries()] == [1, 5.0]
    shutil.rmtree(place / ".records")
    (place / ".records").symlink_to(".records")
    with pytest.raises(OSError):
        storage.sidecars.sizes()
    journal.append(event("run_ended", state="finished", exit_code=0, reason=""), 1)
    assert [one.time for one in looks.entries()] == [1, 5.0, 5.0]
    assert looks.unread
    # The journal itself, too; and it comes back.
    (run / "journal.jsonl").rename(run / "elsewhere")
    (run / "journal.jsonl").symlink_to("journal.jsonl")
    assert [one.time for one in looks.entries()] == [1, 5.0, 5.0]
    assert "journal.jsonl" in looks.unread
    (run / "journal.jsonl").unlink()
    assert [one.time for one in looks.entries()] == [1, 5.0, 5.0]
    (run / "elsewhere").rename(run / "journal.jsonl")
    (place / ".records").unlink()
    assert [one.time for one in looks.entries()] == [5.0, 5.0] and not looks.unread


def test_storage_that_does_not_answer_holds_up_nobody_who_has_a_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "COPY_INTERVAL_S", 60.0)
    answers = threading.Event()

    def sizes(self: LocalSidecars, prefix: str = "") -> dict[str, int]:
        answers.wait(60)
        raise OSError("it is gone")

    monkeypatch.setattr(LocalSidecars, "sizes", sizes)
    (tmp_path / "config.yaml").write_text(f"output_dir: {tmp_path}\ncheckpoint:\n  location: {tmp_path.parent}/place\n")
    Journal(tmp_path / "journal.jsonl", lambda: 5.0).append(event("run_started", run_id="new"), 0)
    looks = History(str(tmp_path), patience_s=0.1)
    for _ in range(3):
        assert len(looks.entries()) == 1 and "has not answered" in looks.unread
    answers.set()
    while "it is gone" not in looks.unread:
        assert len(looks.entries()) == 1
    # It is not asked again so soon.
    assert len(looks.entries()) == 1 and "it is gone" in looks.unread


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        History(str(tmp_path)).entries()


def test_looking_writes_nothing(tmp_path: Path) -> None:
    """A journal alone, as on a volume that is mounted read-only, and next to damaged files."""
    journal = Journal(tmp_path / "journal.jsonl", lambda: 5.0)
    journal.append(event("run_started", run_id="life"), 0)
    assert History(str(tmp_path)).entries() == read_journal(tmp_path / "journal.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]
    (tmp_path / "run.json").write_text("{")
    assert History(str(tmp_path)).entries() == read_journal(tmp_path / "journal.jsonl")


def test_of_several_nodes_that_led_each_shows_the_time_in_which_it_did(tmp_path: Path) -> None:
    def line(time: float, name: str, **details: object) -> bytes:
        text: str = json.dumps({"time": time, "event": name, "attempt": 1, **details})
        return text.encode() + b"\n"

    storage = LocalStorage(tmp_path)
    storage.sidecars.write_restart_state(RestartState(lineage="abc").to_json(1).encode())
    first = line(1, "run_started", run_id="a") + line(2, "progress", step=1)
    second = line(1.5, "run_started", run_id="b", leads=False) + line(2.1, "progress", step=1)
    second += line(3, "run_started", run_id="b") + line(4, "progress", step=2)
    storage.sidecars.write("journal-abc-a.000000.jsonl", first)
    storage.sidecars.write("journal-abc-b.000000.jsonl", second)
    assert [entry.time for entry in History(str(tmp_path)).entries()] == [1, 2, 3, 4]
    # One that only followed, and has nothing else to show.
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "journal.jsonl").write_bytes(second[: second.index(b"3, ")].rpartition(b"\n")[0] + b"\n")
    assert [entry.time for entry in History(str(tmp_path / "alone")).entries()] == [1.5, 2.1]
