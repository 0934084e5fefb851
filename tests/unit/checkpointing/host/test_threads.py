"""Calls that may never return."""

from __future__ import annotations

import threading

import pytest

from checkpointing.host.threads import in_background, side_by_side


def test_a_call_gives_its_result_or_its_error() -> None:
    assert in_background(lambda: 7, "test").result(60) == 7
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0, "test").result(60)


def test_a_call_that_does_not_return_can_be_left_behind() -> None:
    release, names = threading.Event(), list[str]()

    def wait() -> None:
        names.append(threading.current_thread().name)
        assert threading.current_thread().daemon
        release.wait(60)

    future = in_background(wait, "a-name")
    with pytest.raises(TimeoutError):
        future.result(0.01)
    release.set()
    future.result(60)
    assert names == ["a-name"]


def test_where_no_thread_can_be_started_calls_are_made_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [lambda: 7, lambda: 1 // 0, lambda: 8]
    barrier = threading.Barrier(2)
    assert len({outcome.result() for outcome in side_by_side([barrier.wait] * 2, "together")}) == 2

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    first, second, third = side_by_side(calls, "test")
    assert (first.result(), third.result()) == (7, 8)
    with pytest.raises(ZeroDivisionError):
        second.result()
