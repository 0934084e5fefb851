"""Ranks start as forks until these cannot use the GPU."""

from __future__ import annotations

from typing import Any

from helpers.node_fakes import FakeDisplay

from checkpointing.agent.events import Event
from runner.journal.events import ColdStart
from runner.launcher.start_method import StartMethod
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind

IN_FORK = Failure(FailureKind.BOOT, "Cannot re-initialize CUDA in forked subprocess", 0, may_pass=True, in_fork=True)
OTHER = Failure(FailureKind.CRASHED, "why", 0)


class Bench:
    def __init__(self, *, cold: bool) -> None:
        self.display, self.recorded = FakeDisplay(), list[Event]()
        display: Any = self.display
        self.method = StartMethod(cold=cold, display=display, record=self.recorded.append)


def test_forks_that_cannot_use_the_gpu_are_given_up_once() -> None:
    bench = Bench(cold=False)
    assert bench.method.revise(OTHER) == OTHER and not bench.method.cold
    assert bench.method.revise(IN_FORK) == IN_FORK
    assert bench.method.cold and bench.recorded == [ColdStart(reason=IN_FORK.cause)]
    assert "from now on ranks start as fresh interpreters" in bench.display.texts[0]


def test_the_same_error_without_forks_is_not_retried() -> None:
    bench = Bench(cold=True)
    revised = bench.method.revise(IN_FORK)
    assert (revised.may_pass, revised.in_fork) == (False, False) and not bench.recorded
    assert bench.method.revise(OTHER) == OTHER
