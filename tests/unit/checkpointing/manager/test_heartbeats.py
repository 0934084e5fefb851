"""What a watchdog reads of a rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from checkpointing.host.heartbeat import ControlPage, Phase
from checkpointing.manager import reporter
from checkpointing.manager.reporter import HeartbeatWriter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(value=10.0)
    monkeypatch.setattr(reporter, "time", SimpleNamespace(monotonic=lambda: now.value))
    monkeypatch.setattr(reporter, "machine_clock", lambda: now.value)
    return now


def test_a_step_has_a_duration_only_where_nothing_else_ran_in_it(clock: SimpleNamespace) -> None:
    page = ControlPage.create(2)
    beats = HeartbeatWriter(page, 1)
    seen = []

    def at(seconds: float, action: Callable[[], None]) -> None:
        clock.value += seconds
        action()
        seen.append((page.read(1).phase, page.read(1).step, page.read(1).step_s))

    beats.set_start(4)
    at(1, lambda: beats.end_step(5))  # began before anything was known
    at(2, lambda: beats.end_step(6))
    with beats.during(Phase.SAVING, 6):
        at(1, lambda: None)
        clock.value += 5
    at(0, lambda: None)
    at(3, lambda: beats.end_step(7))
    at(1, lambda: beats.interrupt(Phase.IDLE))
    at(9, lambda: beats.end_step(8))
    training = Phase.TRAINING
    assert seen == [
        (training, 5, 0.0),
        (training, 6, 2.0),
        (Phase.SAVING, 6, 0.0),
        (training, 6, 0.0),
        (training, 7, 3.0),
        (Phase.IDLE, 7, 0.0),
        (training, 8, 0.0),
    ]
    beat = page.read(1)
    assert (beat.start_step, beat.start_time, beat.time, beat.beats) == (4, 10.0, 32.0, 7)
    assert page.read(0).beats == 0


def test_a_save_outside_of_steps_does_not_begin_one() -> None:
    """At the end of an epoch, or of training, which then waits for a commit for longer than a step takes."""
    page = ControlPage.create(1)
    beats = HeartbeatWriter(page, 0)
    for phase in (Phase.IDLE, Phase.SAVING):
        beats.write(phase, 3)
        with beats.during(Phase.SAVING, 4):
            assert (page.read(0).phase, page.read(0).step) == (Phase.SAVING, 4)
        assert (page.read(0).phase, page.read(0).step) == (phase, 4)


def test_a_step_in_which_the_compiler_works_says_so(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks: dict[str, Any] = {}
    handler = SimpleNamespace(
        register_start_callback=lambda callback: callbacks.update(start=callback),
        register_end_callback=lambda callback: callbacks.update(end=callback),
    )
    module: Any = ModuleType("torch._dynamo.callback")
    module.callback_handler = handler
    page = ControlPage.create(1)
    beats = HeartbeatWriter(page, 0)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    beats.watch_compiler()
    assert not callbacks
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    monkeypatch.setitem(sys.modules, "torch._dynamo.callback", module)
    beats.watch_compiler()
    beats.end_step(3)
    callbacks["start"](None)
    assert page.read(0).phase is Phase.COMPILING
    callbacks["end"](None)
    assert page.read(0).phase is Phase.TRAINING
    clock.value += 60
    beats.end_step(4)
    assert page.read(0).step_s == 0.0
    beats.interrupt(Phase.SAVING)
    callbacks["start"](None)
    assert page.read(0).phase is Phase.SAVING


def test_a_failure_while_no_step_runs_leaves_the_phase_until_the_next_step() -> None:
    page = ControlPage.create(1)
    beats = HeartbeatWriter(page, 0)
    beats.end_step(1)
    with pytest.raises(MemoryError), beats.during(Phase.IDLE):
        raise MemoryError
    assert page.read(0).phase is Phase.IDLE
    beats.end_step(2)
    assert page.read(0).phase is Phase.TRAINING


def test_a_failure_meanwhile_does_not_leave_the_phase(clock: SimpleNamespace) -> None:
    """A script may go on after an error of its own, or of a commit."""
    page = ControlPage.create(1)
    beats = HeartbeatWriter(page, 0)
    beats.end_step(1)
    clock.value += 2
    with pytest.raises(OSError, match="full"), beats.during(Phase.SAVING):
        clock.value += 7
        raise OSError("full")
    assert page.read(0).phase is Phase.TRAINING
    clock.value += 1
    beats.end_step(2)
    assert page.read(0).step_s == 3.0
