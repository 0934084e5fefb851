"""What a signal does to a rank, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal
from checkpointing.manager import stop_signal
reports = []
stop_signal.install(lambda: reports.append(1))
{before}
os.kill(os.getpid(), signal.{name})
print(stop_signal.requested(), len(reports))
"""


def run(name: str, before: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(name=name, before=before)], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_while_somebody_reads_a_signal_sets_the_flag(name: str) -> None:
    assert run(name, "stop_signal.begin_reading()") == (0, "True 1")


def test_without_a_reader_it_has_its_usual_effect() -> None:
    assert run("SIGTERM", "") == (-signal.SIGTERM, "")
    assert run("SIGTERM", "stop_signal.begin_reading(); stop_signal.end_reading()") == (-signal.SIGTERM, "")


def test_a_process_that_is_ending_for_a_signal_takes_no_second_one() -> None:
    assert run("SIGTERM", "stop_signal.begin_reading(); stop_signal.end_reading(stopped=True)") == (0, "True 1")


def test_a_forked_child_leaves_a_notice_to_its_parent() -> None:
    before = "stop_signal.begin_reading()\nif os.fork(): os._exit(os.waitstatus_to_exitcode(os.wait()[1]))"
    assert run("SIGUSR1", before) == (0, "False 0")
