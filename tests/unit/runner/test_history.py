from __future__ import annotations

from pathlib import Path

import pytest

from checkpointing.storage import open_storage
from runner import history
from runner.errors import UsageError
from runner.history import JournalCopy, events_at
from runner.journal import Journal, read_journal
from runner.record import RunRecord


def test_only_the_last_chunk_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_CHUNK_BYTES", 100)
    storage = open_storage(str(tmp_path / "checkpoints"))
    journal = Journal(tmp_path / "journal.jsonl", lambda: 5.0)
    copy = JournalCopy(tmp_path / "journal.jsonl", "abc", "life")
    written: list[str] = []

    def keep(name: str, path: Path, start: int, end: int) -> None:
        written.append(name)
        storage.write_record(name, path.read_bytes()[start:end])

    for number in range(20):
        journal.append("log", 1, step=number)
        copy.turn(float(number), keep)
        if number == 0:
            assert written == ["journal-abc-life.000000.jsonl"]
    copy.flush(keep)
    count = len(written)
    copy.flush(keep)
    assert len(written) == count, "nothing is new"
    # Once for each look in which it grew, and each of the chunks that were full before at most once more.
    assert written.count("journal-abc-life.000000.jsonl") == 2
    storage.write_note(RunRecord(lineage="abc").to_json(1).encode())
    # Another run's, which was here before.
    storage.write_record("journal-old-life.000000.jsonl", b'{"time": 1, "event": "run_started", "attempt": 0}\n')
    assert events_at(str(tmp_path / "checkpoints")) == read_journal(tmp_path / "journal.jsonl")


def test_the_last_words_are_kept_without_an_agent(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "checkpoints"))
    journal = Journal(tmp_path / "journal.jsonl", lambda: 5.0)
    copy = JournalCopy(tmp_path / "journal.jsonl", "abc", "life")
    journal.append("run_ended", 1, state="finished", exit_code=0, reason="")
    copy.finish(storage)
    assert [event["event"] for event in events_at(str(tmp_path / "checkpoints"))] == ["run_ended"]
    # A storage that refuses costs nothing but the copy.
    (tmp_path / "file").touch()
    JournalCopy(tmp_path / "journal.jsonl", "abc", "life").finish(open_storage(str(tmp_path / "file" / "below")))


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        events_at(str(tmp_path))


def test_looking_writes_nothing(tmp_path: Path) -> None:
    """A journal alone, as on a volume that is mounted to be read; and beside what is damaged."""
    journal = Journal(tmp_path / "journal.jsonl", lambda: 5.0)
    journal.append("run_started", 0, run_id="life")
    assert events_at(str(tmp_path)) == read_journal(tmp_path / "journal.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]
    (tmp_path / "run.json").write_text("{")
    assert events_at(str(tmp_path)) == read_journal(tmp_path / "journal.jsonl")
