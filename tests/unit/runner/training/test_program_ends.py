"""Calls that end a rank without reporting are heard in the rank, and do what they always do in its children."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from queue import Queue
from types import SimpleNamespace

import pytest

from runner.training import program_ends
from runner.training.program_ends import ProcessReplaced, heard_ends, name_what_stays, unfinished_training


def test_the_functions_are_those_of_before_in_the_end() -> None:
    before = os._exit, os.execv, os.execve
    with pytest.raises(KeyError), heard_ends(lambda text: None):
        assert os._exit is not before[0]
        raise KeyError
    assert (os._exit, os.execv, os.execve) == before


@pytest.mark.parametrize("status", [0, 3])
def test_an_exit_at_once_becomes_one_that_nothing_holds_up(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared, over = list[bool](), threading.Event()
    monkeypatch.setattr(atexit, "_clear", lambda: cleared.append(True))
    monkeypatch.setattr(threading, "_shutdown", threading._shutdown)  # type: ignore[attr-defined]
    threading.Thread(target=over.wait).start()
    with pytest.raises(SystemExit) as ended, heard_ends(lambda text: None):
        os._exit(status)
    threading._shutdown()  # type: ignore[attr-defined]
    over.set()
    assert ended.value.code == status and cleared == [True]


@pytest.mark.parametrize(("status", "left"), [(0, 1), (7, 7)])
def test_an_exit_of_another_thread_is_reported_and_no_success(
    status: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports, codes = list[str](), list[int]()

    class Gone(Exception):
        pass

    def end(code: int) -> None:
        codes.append(code)
        raise Gone

    def call() -> None:
        with pytest.raises(Gone):
            os._exit(status)

    monkeypatch.setattr(os, "_exit", end)
    with heard_ends(reports.append):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert codes == [left] and reports == [f"SystemExit: a thread of the program called os._exit({status})"]


@pytest.mark.parametrize(
    "replace",
    [
        lambda: os.execv("/bin/true", ["true"]),
        lambda: os.execve("/bin/true", ["true"], {}),
        lambda: os.execvp("true", ["true"]),
        lambda: os.execl("/bin/true", "true"),
        lambda: os.execlpe("true", "true", {"A": "b"}),
    ],
)
def test_nothing_takes_the_place_of_a_rank(replace: Callable[[], None]) -> None:
    refused = pytest.raises(ProcessReplaced, match=r"would replace this rank .* before runner start")
    with heard_ends(lambda text: None), refused:
        replace()


def test_in_a_child_of_the_rank_they_do_what_they_always_do() -> None:
    with heard_ends(lambda text: None):
        ends: list[Callable[[], None]] = [
            lambda: os._exit(5),
            lambda: os.execv(sys.executable, [sys.executable, "-c", "exit(5)"]),
        ]
        for end in ends:
            pid = os.fork()
            if pid == 0:
                end()
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


def test_what_keeps_a_process_is_named() -> None:
    over, said, known = threading.Event(), Queue[str](), threading.enumerate()
    thread = threading.Thread(target=over.wait, name="upload")
    thread.start()
    name_what_stays(3, said.put, after_s=0.0, again_s=10_000.0)
    try:
        text = said.get(timeout=60)
    finally:
        over.set()
        thread.join()
    assert "rank 3 has ended its program, but its process goes on: " in text
    assert "upload (" in text and "threading.py" in text
    assert [one.name for one in threading.enumerate() if one not in known] == ["process-end"]


@pytest.mark.parametrize(("found", "said"), [(None, None), ((24, 40), "ended with status 0 at step 24 of 40")])
def test_what_is_left_of_a_training(
    found: tuple[int, int] | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = SimpleNamespace(unfinished_training=lambda: found)
    monkeypatch.setattr(program_ends, "sys", SimpleNamespace(modules={"checkpointing.manager.manager": manager}))
    text = unfinished_training()
    assert (text is None) if said is None else (text is not None and said in text)


def test_a_program_without_a_manager_has_nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_ends, "sys", SimpleNamespace(modules={}))
    assert unfinished_training() is None
