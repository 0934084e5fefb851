"""Calls that may never return, and waits that end."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def in_background(call: Callable[[], T], name: str) -> Future[T]:
    """Start a call in a daemon thread, which may be abandoned: it keeps no process alive.

    The threads of an executor do, because the interpreter joins them at its end.
    """
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return outcome


def side_by_side(calls: Iterable[Callable[[], T]], name: str) -> list[Future[T]]:
    """Make several calls at the same time, and return their outcomes once all have ended.

    Where no thread can be started (a limit of processes), they are made one after the other.
    """
    outcomes: list[Future[T]] = []
    for call in calls:
        try:
            outcomes.append(in_background(call, name))
        except RuntimeError:
            outcomes.append(Future())
            try:
                outcomes[-1].set_result(call())
            except BaseException as error:
                outcomes[-1].set_exception(error)
    wait(outcomes)
    return outcomes


def is_readable(file: object, timeout_s: float) -> bool:
    """Wait until a file descriptor, or an object that has one, can be read; return whether it can.

    Unlike `select.select`, this also works in a process that has more than 1,024 files open.
    """
    poll = select.poll()
    poll.register(file, select.POLLIN)  # type: ignore[arg-type]
    return bool(poll.poll(timeout_s * 1e3))
