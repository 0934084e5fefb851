from __future__ import annotations

from pathlib import Path

from runner.journal import Journal, read_journal


def test_events_survive_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, clock=lambda: 12.3456)
    journal.append("run_started", 0, run_id="r")
    journal.close()
    with path.open("a") as file:
        file.write('{"time": 13, "event": "comm')
    again = Journal(path, clock=lambda: 14.0)
    again.append("committed", 1, step=20)
    again.close()
    assert read_journal(path) == [
        {"time": 12.346, "event": "run_started", "attempt": 0, "run_id": "r"},
        {"time": 14.0, "event": "committed", "attempt": 1, "step": 20},
    ]


def test_no_journal_is_no_events(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "none") == []
