"""When an agent counts as silent, and when as stuck."""

from __future__ import annotations

import pytest

from runner.node.helpers import AgentPulse


@pytest.mark.parametrize(("quiet_timeout_s", "limit_s"), [(1800.0, 120.0), (30.0, 30.0)])
def test_an_answer_is_overdue_after_the_limit(quiet_timeout_s: float, limit_s: float) -> None:
    pulse = AgentPulse(quiet_timeout_s, 1000.0)
    assert not pulse.is_silent(1000.0 + limit_s) and pulse.is_silent(1000.1 + limit_s)
    pulse.answered(1010.0)
    assert not pulse.is_silent(1010.0 + limit_s) and pulse.is_silent(1010.1 + limit_s)


def test_pings_are_sent_every_two_seconds() -> None:
    pulse = AgentPulse(60.0, 1000.0)
    assert [pulse.ping_due(1000.0 + second) for second in range(1, 6)] == [False, True, False, True, False]


def test_a_time_without_turns_counts_against_nobody() -> None:
    pulse = AgentPulse(30.0, 1000.0)
    assert pulse.turn(1003.0) == 0.0
    assert pulse.turn(1503.0) == 500.0
    assert not pulse.is_silent(1529.0) and pulse.is_silent(1531.0)


def test_a_new_attempt_restarts_the_time_to_answer() -> None:
    pulse = AgentPulse(30.0, 1000.0)
    pulse.restart(1500.0)
    assert pulse.turn(1501.0) == 0.0 and not pulse.is_silent(1530.0)


def test_only_progress_puts_off_the_time_to_give_up() -> None:
    pulse = AgentPulse(30.0, 1000.0)
    pulse.answered(1500.0)
    assert pulse.give_up_at == 1600.0
    pulse.progressed(1500.0)
    assert pulse.give_up_at == 2100.0
