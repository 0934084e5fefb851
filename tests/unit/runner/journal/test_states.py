from __future__ import annotations

import pytest

from runner.journal.states import RunState, StateMachine


def test_a_life_with_a_restart_and_a_stop() -> None:
    machine = StateMachine()
    for state in (RunState.RUNNING, RunState.BACKOFF, RunState.RUNNING, RunState.STOPPING, RunState.PREEMPTED):
        machine.move(state)
    assert machine.ended


@pytest.mark.parametrize("target", [RunState.RUNNING, RunState.STARTING, RunState.BACKOFF])
def test_nothing_follows_the_end(target: RunState) -> None:
    machine = StateMachine()
    machine.move(RunState.FAILED)
    with pytest.raises(AssertionError, match="illegal move failed"):
        machine.move(target)
