"""Files and a signal, and what they ask for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.session.requests import LOOK_EVERY_S, SAVE, STOP, Requests
from runner.system.event_loop import StopRequest


class Loop:
    """Calls its only timer when a test says so."""

    look: Callable[[], None]

    def every(self, interval_s: float, handler: Callable[[], None]) -> None:
        assert interval_s == LOOK_EVERY_S
        self.look = handler


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[tuple[Requests, Any, StopRequest, Path]]:
    before = signal.getsignal(signal.SIGUSR2)
    stop, loop, folder = StopRequest(), Loop(), tmp_path / "run" / "requests"
    yield Requests(folder, stop), loop, stop, folder
    signal.signal(signal.SIGUSR2, before)


def test_each_file_is_taken_once(asked: tuple[Requests, Any, StopRequest, Path]) -> None:
    requests, loop, stop, folder = asked
    requests.watch(loop, begins=True)
    loop.look()
    assert not stop and requests.take_save() == ""
    (folder / SAVE).touch()
    loop.look()
    assert [requests.take_save(), requests.take_save()] == ["runner save", ""] and not stop
    (folder / STOP).touch()
    loop.look()
    assert stop.reason == "runner stop" and not list(folder.iterdir())


def test_what_was_asked_of_an_earlier_session_is_dropped(asked: tuple[Requests, Any, StopRequest, Path]) -> None:
    requests, loop, stop, folder = asked
    folder.mkdir(parents=True)
    for name in (SAVE, STOP):
        (folder / name).touch()
    requests.watch(loop, begins=True)
    loop.look()
    assert not stop and requests.take_save() == "" and not list(folder.iterdir())


def test_a_run_that_goes_on_under_another_leader_is_still_asked(asked: tuple[Requests, Any, StopRequest, Path]) -> None:
    requests, loop, stop, folder = asked
    folder.mkdir(parents=True)
    (folder / STOP).touch()
    requests.watch(loop, begins=False)
    loop.look()
    assert stop.reason == "runner stop"


def test_the_folder_is_this_users_alone(asked: tuple[Requests, Any, StopRequest, Path]) -> None:
    requests, loop, _, folder = asked
    requests.watch(loop, begins=True)
    assert folder.stat().st_mode & 0o077 == 0


def test_a_request_that_cannot_be_removed_is_none(asked: tuple[Requests, Any, StopRequest, Path]) -> None:
    """It would be one each second."""
    requests, loop, stop, folder = asked
    requests.watch(loop, begins=True)
    (folder / STOP).mkdir()
    loop.look()
    assert not stop


def test_sigusr2_asks_for_a_checkpoint(asked: tuple[Requests, Any, StopRequest, Path]) -> None:
    requests, *_ = asked
    requests.count_signals()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert [requests.take_save(), requests.take_save()] == ["SIGUSR2", ""]
