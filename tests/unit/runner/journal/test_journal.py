from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.journals import entry, event
from infra.parts import lacks

from checkpointing.agent.events import Committed, Log
from checkpointing.host.heartbeat import machine_clock
from runner.journal.events import Entry, Malformed
from runner.journal.journal import Journal, JournalReader, SteadyClock, read_journal


def known(found: list[Entry]) -> list[Entry]:
    return [one for one in found if not isinstance(one.event, Malformed)]


def test_events_survive_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, clock=lambda: 12.3456)
    journal.append(event("run_started", run_id="r"), 0)
    journal.close()
    with path.open("a") as file:
        file.write('{"time": 13, "event": "comm')
    again = Journal(path, clock=lambda: 14.0)
    again.append(event("committed", step=20), 1)
    again.close()
    first, torn, last = read_journal(path)
    assert first == entry(12.346, "run_started", 0, run_id="r")
    assert isinstance(torn.event, Malformed) and torn.time == 12.346
    assert last == entry(14.0, "committed", 1, step=20)


def test_a_journal_that_grows_is_read_once(tmp_path: Path) -> None:
    """Wherever a look falls, it sees what reading all of it would."""
    path = tmp_path / "journal.jsonl"
    reader = JournalReader(path)
    assert reader.entries() == []
    whole = b'{"time": 1, "event": "a", "attempt": 0}\n{"time": 2, "eve\n[]\n{"time": 3, "event": "b", "attempt": 1}\n'
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        assert reader.entries() == read_journal(path)
    assert [one.event.to_dict()["event"] for one in known(reader.entries())] == ["a", "b"]
    assert len(reader.entries()) == 4, "damaged lines are kept, so that they can be counted"
    # Another one in its place; a damaged first line has no time to be recorded under.
    path.write_bytes(whole[40:])
    assert [one.event.to_dict()["event"] for one in reader.entries()] == ["b"]
    path.write_bytes(whole * 9)
    assert len(known(reader.entries())) == 18
    # A power cut has taken its end.
    path.write_bytes(whole * 4)
    assert len(known(reader.entries())) == 8
    path.unlink()
    assert reader.entries() == []


def test_a_reader_for_weeks_keeps_a_bounded_number_of_log_entries(tmp_path: Path) -> None:
    """Two kilobytes each: of a week with an entry a second, more than a gigabyte."""
    journal = Journal(tmp_path / "journal.jsonl", clock=lambda: 1.0)
    reader = JournalReader(tmp_path / "journal.jsonl", max_logs=100)
    attempt_of_step = {step: 1 if step <= 333 else 2 for step in range(1, 1001)}
    for step, attempt in attempt_of_step.items():
        journal.append(event("log", step=step, loss=1.0), attempt)
        if step % 10 == 0:
            journal.append(event("committed", step=step), attempt)
            logs = [one.event.step for one in reader.entries() if isinstance(one.event, Log)]
            assert len(logs) <= 101 and logs == sorted(logs) and logs[-1] == step
    assert 333 in logs, "where an attempt ended"
    gaps = {later - earlier for earlier, later in pairwise(logs)}
    assert len(logs) > 50 and max(gaps) == 16, gaps
    assert sum(isinstance(one.event, Committed) for one in reader.entries()) == 100
    assert len(JournalReader(tmp_path / "journal.jsonl").entries()) == 1100


def test_more_attempts_than_log_entries_are_all_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", clock=lambda: 1.0)
    for attempt in range(50):
        journal.append(event("log", step=attempt, loss=1.0), attempt)
    assert len(JournalReader(tmp_path / "journal.jsonl", max_logs=10).entries()) == 50


def test_a_long_journal_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.journal.journal._PIECE_BYTES", 7)
    journal = Journal(tmp_path / "journal.jsonl", clock=lambda: 1.0)
    for step in range(20):
        journal.append(event("committed", step=step), 1)
    assert [one.event.step for one in read_journal(tmp_path / "journal.jsonl") if isinstance(one.event, Committed)] == [
        *range(20)
    ]


def test_no_journal_is_no_events(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "none") == []


def test_a_full_disk_delays_events_but_loses_none(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    if os.system(f"mount -t tmpfs -o size=160k tmpfs {mount} 2>/dev/null") != 0:
        lacks("tmpfs", "mount failed")
    try:
        filler = mount / "filler"
        journal = Journal(mount / "journal.jsonl", clock=lambda: 1.0)
        journal.append(event("first"), 1)
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
        # How a run ends is written all the same; what is more than that, later.
        journal.append(event("run_ended", state="failed", exit_code=76), 1)
        assert journal.is_complete and len(read_journal(mount / "journal.jsonl")) == 2
        for number in range(400):
            journal.append(event("while full", number=number, padding="x" * 100), 1)
        assert not journal.is_complete and len(read_journal(mount / "journal.jsonl")) < 402
        filler.unlink()
        journal.append(event("last"), 1)
        events = [one.event.to_dict() for one in read_journal(mount / "journal.jsonl")]
        assert [one.get("number") for one in events] == [None, None, *range(400), None]
        journal.close()
        # Nor is room kept that nobody needs any more.
        assert (mount / "journal.jsonl").stat().st_blocks * 512 < (mount / "journal.jsonl").stat().st_size + 4096
    finally:
        os.system(f"umount {mount}")


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 3000,
        b'{"time": "12", "event": "log", "attempt": 1}',
        b'{"time": NaN, "event": "log", "attempt": 1}',
        b'{"time": 1e300, "event": "log", "attempt": 1}',
        b'{"time": 12, "event": ["log"], "attempt": 1}',
    ],
)
def test_a_damaged_line_is_passed_over(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    good = b'{"time": 13.0, "event": "committed", "attempt": 1, "step": 20}'
    path.write_bytes(b"\n".join([line, good]))
    assert known(read_journal(path)) == [entry(13.0, "committed", 1, step=20)]


def test_a_clock_that_is_set_leaves_the_journal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    clock = SteadyClock(not_before=4000.0)
    assert clock() == pytest.approx(5000.0, abs=60)
    for set_to in (1000.0, 9000.0):
        monkeypatch.setattr(time, "time", lambda now=set_to: now)
        assert clock() == pytest.approx(5000.0, abs=60)
    assert clock.at(machine_clock() - 500) == pytest.approx(4500.0, abs=60)


def test_a_run_goes_on_after_what_its_journal_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the wall clock says now: times of a journal never go back."""
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert SteadyClock(not_before=5000.0)() == pytest.approx(5000.0, abs=60)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_file_system_that_fails_for_a_while_costs_no_event_and_no_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale handle of the output folder ended a run in mid-training, by an error without a path."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, clock=lambda: 12.0)
    journal.append(event("run_started", run_id="r"), 0)

    def fails(*_: object) -> int:
        raise OSError(number, "it failed")

    with monkeypatch.context() as patch:
        for name in ("write", "fstat", "open"):
            patch.setattr(os, name, fails)
        journal._reserved = 0
        for step in (10, 20):
            journal.append(event("committed", step=step), 1)
        assert not journal.is_complete and journal.error == "it failed"
    if number == errno.ESTALE:
        # The server knows the old handle no more.
        os.close(journal._fd)
        journal._fd = os.open(tmp_path, os.O_RDONLY)
        monkeypatch.setattr(os, "write", raising_once(os.write, OSError(number, "it failed")))
        journal.append(event("committed", step=30), 1)
    journal.append(event("committed", step=40), 1)
    journal.close()
    assert journal.is_complete
    steps = [one.event.step for one in read_journal(path) if isinstance(one.event, Committed)]
    assert steps == [10, 20, *([30] if number == errno.ESTALE else []), 40]


def raising_once(call: Callable[..., int], error: OSError) -> Callable[..., int]:
    waiting = [error]

    def replaced(*arguments: Any) -> int:
        if waiting:
            raise waiting.pop()
        return call(*arguments)

    return replaced
