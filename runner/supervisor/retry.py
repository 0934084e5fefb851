"""The loop around attempts: run one, decide, wait, run the next."""

from __future__ import annotations

from collections.abc import Callable

import tenacity

from runner.config.schema import RestartConfig
from runner.journal.events import Backoff
from runner.recovery.policy import Restart, Stop, backoff_s
from runner.session.session import Session


def retry(attempt: Callable[[], Restart | Stop], restart: RestartConfig, session: Session) -> Stop:
    """Call `attempt` until it decides to stop, with a backoff before each further call.

    The number of calls is limited by the decisions (`policy.decide`), not here.

    Args:
        attempt: Runs one attempt and decides what follows.
        restart: Has the durations of the backoff.
        session: Records the backoff and waits; a stop request ends the wait.

    Returns:
        The last decision.
    """

    def wait(state: tenacity.RetryCallState) -> float:
        decision = state.outcome.result() if state.outcome else None
        assert isinstance(decision, Restart)
        return backoff_s(
            decision.failures_in_a_row,
            initial_s=restart.backoff_initial_s,
            max_s=restart.backoff_max_s,
            jitter_s=restart.backoff_jitter_s,
        )

    def record(state: tenacity.RetryCallState) -> None:
        delay_s = state.next_action.sleep if state.next_action else 0.0
        session.record(Backoff(delay_s=round(delay_s, 3)))

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_result(lambda decision: isinstance(decision, Restart)),
        stop=tenacity.stop_never,
        wait=wait,
        before_sleep=record,
        sleep=session.sleep,
    )
    decision = retrying(attempt)
    assert isinstance(decision, Stop)
    return decision
