"""What a signal does to a rank, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal
from checkpointing.manager import rank_signals
reports = []
rank_signals.install(lambda: reports.append(1))
{before}
os.kill(os.getpid(), signal.{name})
print(rank_signals.requested(), len(reports))
"""


def run(name: str, before: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(name=name, before=before)], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_while_somebody_reads_a_signal_sets_the_flag(name: str) -> None:
    assert run(name, "rank_signals.begin_reading()") == (0, "True 1")


def test_without_a_reader_it_has_its_usual_effect() -> None:
    assert run("SIGTERM", "") == (-signal.SIGTERM, "")
    assert run("SIGTERM", "rank_signals.begin_reading(); rank_signals.end_reading()") == (-signal.SIGTERM, "")


def test_a_process_that_is_ending_for_a_signal_takes_no_second_one() -> None:
    assert run("SIGTERM", "rank_signals.begin_reading(); rank_signals.end_reading(stopped=True)") == (0, "True 1")


def test_a_forked_child_leaves_a_notice_to_its_parent() -> None:
    before = "rank_signals.begin_reading()\nif os.fork(): os._exit(os.waitstatus_to_exitcode(os.wait()[1]))"
    assert run("SIGUSR1", before) == (0, "False 0")


OWN = """
def own(number, frame):
    print("own", end=" ")
    {does}
rank_signals.begin_reading()
first = signal.signal(signal.{name}, own)
rank_signals.{look}()
"""


@pytest.mark.parametrize("look", ["requested", "install"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_handler_that_the_script_sets_later_hides_no_signal(name: str, look: str) -> None:
    assert run(name, OWN.format(name=name, look=look, does="first(number, frame)")) == (0, "own True 2")


def test_a_handler_that_exits_leaves_the_end_to_the_next_step_boundary() -> None:
    before = f"import sys{OWN.format(name='SIGTERM', look='requested', does='sys.exit(0)')}"
    assert run("SIGTERM", before) == (0, "own True 1")
    assert run("SIGTERM", f"{before}\nrank_signals.end_reading()") == (0, "own")


def test_other_exceptions_of_a_handler_are_the_scripts() -> None:
    before = OWN.format(name="SIGTERM", look="requested", does="raise RuntimeError")
    assert run("SIGTERM", before) == (1, "own")


@pytest.mark.parametrize(
    ("handler", "status", "name"),
    [("signal.SIG_DFL", -signal.SIGTERM, "SIGTERM"), ("signal.default_int_handler", -signal.SIGINT, "SIGINT")],
)
def test_what_undoes_handlers_is_left_alone(handler: str, status: int, name: str) -> None:
    before = f"rank_signals.begin_reading(); signal.signal(signal.{name}, {handler}); rank_signals.requested()"
    assert run(name, before) == (status, "")


def test_a_handler_that_is_taken_back_is_called_no_more() -> None:
    before = OWN.format(name="SIGTERM", look="requested", does="") + "\nsignal.signal(signal.SIGTERM, first)"
    assert run("SIGTERM", before) == (0, "True 1")


def test_a_forked_child_keeps_the_scripts_handler() -> None:
    before = OWN.format(name="SIGTERM", look="requested", does="os._exit(7)")
    before += "\nif child := os.fork(): os._exit(os.waitstatus_to_exitcode(os.wait()[1]))"
    assert run("SIGTERM", before)[0] == 7


def test_sigusr2_asks_for_a_checkpoint_with_and_without_a_reader() -> None:
    before = "os.kill(os.getpid(), signal.SIGUSR2)\nprint(rank_signals.num_saves(), end=' ')"
    assert run("SIGUSR2", f"{before}\nrank_signals.begin_reading()") == (0, "1 False 0")


def test_a_handler_of_the_script_for_sigusr2_stays() -> None:
    own = """
import subprocess, sys
signal.signal(signal.SIGUSR2, lambda *_: print("own", end=" "))
rank_signals._owner = None
rank_signals.install()
"""
    assert run("SIGUSR2", own) == (0, "own False 0")
