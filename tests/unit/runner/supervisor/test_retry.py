"""The loop around attempts: how often, and with which waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.node_fakes import FakeSession

from runner.config.schema import RestartConfig
from runner.errors import ExitCode
from runner.journal.events import Backoff
from runner.recovery.policy import Restart, Stop
from runner.supervisor.retry import retry

STOP = Stop(ExitCode.DONE, "why")
CONFIG = RestartConfig(backoff_initial_s=10.0, backoff_max_s=25.0, backoff_jitter_s=0.0)


def run(folder: Path, decisions: list[Restart | Stop]) -> FakeSession:
    session = FakeSession(folder)
    assert retry(lambda: decisions.pop(0), CONFIG, session) is STOP and not decisions
    return session


def test_a_stop_is_the_end(tmp_path: Path) -> None:
    session = run(tmp_path, [STOP])
    assert not session.waits and not session.events


def test_waits_double_with_the_failures_in_a_row_and_are_recorded(tmp_path: Path) -> None:
    session = run(tmp_path, [*(Restart(number, "why") for number in (1, 2, 3, 4, 1)), STOP])
    assert session.waits == [0.0, 10.0, 20.0, 25.0, 0.0]
    assert session.events == [Backoff(delay_s=delay) for delay in session.waits]


def test_the_loop_has_no_limit_of_its_own(tmp_path: Path) -> None:
    session = run(tmp_path, [*[Restart(1, "why")] * 500, STOP])
    assert len(session.waits) == 500


def test_an_error_of_an_attempt_is_not_retried(tmp_path: Path) -> None:
    def fail() -> Stop:
        raise OSError("why")

    with pytest.raises(OSError, match="why"):
        retry(fail, CONFIG, FakeSession(tmp_path))
