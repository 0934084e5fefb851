from __future__ import annotations

import io
import subprocess

import pytest
from helpers.journals import entries
from rich.console import Console
from unit.runner.journal.test_ledger import EVENTS

from checkpointing.host.locking import this_machine
from runner.journal.summary import summarise
from runner.recovery.restart_state import process_namespace
from runner.system import processes
from runner.system.text import duration
from runner.ui.status import one_line, panel, runner_is_gone


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.7, "1 min 0 s"),
        (119.7, "2 min 0 s"),
        (3599.6, "1 h 0 min"),
        (86399.9, "1 d 0 h"),
        (90000, "1 d 1 h"),
    ],
)
def test_durations_are_rounded_once(seconds: float, text: str) -> None:
    """119.7 s were 1 min 60 s."""
    assert duration(seconds) == text


def test_a_runner_that_is_gone_is_not_running() -> None:
    """For two minutes it was said to run, with the time that it would take yet."""
    with subprocess.Popen(["sleep", "100"]) as other:
        alive = {"host": this_machine(), "pid": other.pid, "started": processes.start_ticks(other.pid)}
        started = {"time": 1.0, "event": "run_started", "attempt": 0, "run_id": "r", "committed_step": -1}
        events = [{**started, "runner": alive, "namespace": process_namespace()}]
        assert not runner_is_gone(entries(events))
        other.kill()
    assert runner_is_gone(entries(events))
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(panel(summarise(entries(events), now=2.0), 2.0, {}, gone=True))
    assert "not running  its runner ended without reporting" in console.export_text()
    # Nobody here can know of those.
    for change in ({"namespace": "pid:[1]"}, {"runner": {**alive, "host": "elsewhere"}}, {"runner": None}):
        assert not runner_is_gone(entries([{**events[0], **change}]))
    assert not runner_is_gone([])


def test_one_line_changes_with_what_happens_and_not_with_the_time() -> None:
    lines = [one_line(summarise(entries(EVENTS[:length]), now=now)) for length in (7, 8, 9, 12) for now in (150, 160)]
    assert lines[::2] == lines[1::2]
    assert lines[::2] == [
        "running · step 0 of 100 · attempt 1",
        "running · step 30 of 100 · loss 7.0000 · attempt 1",
        "running · step 30 of 100 · loss 7.0000 · evaluation loss 6.5000; best step 40, eval_loss 6.5 · attempt 1",
        "backoff · step 50 of 100 · loss 6.0000 · evaluation loss 6.5000; best step 40, eval_loss 6.5 · attempt 1"
        f" · hung: {EVENTS[10]['cause']}",
    ]
    assert one_line(summarise(entries(EVENTS[:8])), gone=True).startswith("not running · step 30")
    over = one_line(summarise(entries(EVENTS)))
    assert over.startswith("finished · step 100 of 100") and over.endswith(
        "committed 60 (local) · attempt 3 · all ranks finished"
    )


def test_a_cause_of_several_lines_is_one_line() -> None:
    failed = {**EVENTS[10], "cause": "Traceback:\n  a\n  b"}
    assert one_line(summarise(entries([*EVENTS[:10], failed]))).endswith("hung: Traceback: a b")
