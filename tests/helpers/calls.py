"""A stand-in for `in_background` that makes the call in the calling thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def at_once(call: Callable[[], Any], name: str) -> Future[Any]:
    outcome: Future[Any] = Future()
    try:
        outcome.set_result(call())
    except OSError as error:
        outcome.set_exception(error)
    return outcome
