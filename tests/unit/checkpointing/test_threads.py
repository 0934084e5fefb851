"""Calls that may never return."""

from __future__ import annotations

import threading

import pytest

from checkpointing.threads import in_background


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
