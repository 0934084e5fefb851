from __future__ import annotations

import pytest

from runner.errors import ExitCode
from runner.failure import Failure, FailureKind
from runner.policy import AttemptRecord, Restart, Stop, decide

K = FailureKind


def record(kind: FailureKind = K.CRASHED, committed: int = -1, fingerprint: str = "") -> AttemptRecord:
    return AttemptRecord(Failure(kind, "cause", 0, 5, fingerprint), committed)


@pytest.mark.parametrize(
    ("history", "stop_requested", "expected"),
    [
        ([record(K.FINISHED)], False, ExitCode.DONE),
        ([record(K.FINISHED)], True, ExitCode.DONE),
        ([record(K.PREEMPTED)], False, ExitCode.PREEMPTED),
        ([record(K.CRASHED)], True, ExitCode.PREEMPTED),
        ([record(K.ENDED)], True, ExitCode.PREEMPTED),
        ([record(K.FENCED)], False, ExitCode.DETERMINISTIC),
        ([record(K.STORAGE_FAILED)], False, ExitCode.STORAGE_FAILED),
        ([record(K.BOOT)], False, ExitCode.DETERMINISTIC),
        ([record(K.NO_VALID_CHECKPOINT)], False, ExitCode.NO_VALID_CHECKPOINT),
        ([record(K.CRASHED)], False, 1),
        ([record(K.AGENT_LOST)], False, 1),
        ([record(K.LAUNCHER_LOST)], False, 1),
        ([record(), record()], False, 2),
        ([record(), record(), record()], False, ExitCode.NO_PROGRESS),
        ([record(committed=10)] * 3, False, ExitCode.BUDGET_SPENT),
        # A new commit refills the budget.
        ([record(committed=10), record(committed=10), record(committed=20)], False, 1),
        ([record(committed=c) for c in range(50)], False, 1),
        # The same error at the same step twice is no accident; another one in between starts anew.
        ([record(fingerprint="a"), record(fingerprint="a")], False, ExitCode.DETERMINISTIC),
        ([record(fingerprint="a"), record(fingerprint="b")], False, 2),
    ],
)
def test_decision(history: list[AttemptRecord], stop_requested: bool, expected: ExitCode | int) -> None:
    decision = decide(history, max_restarts=2, stop_requested=stop_requested)
    if isinstance(expected, ExitCode):
        assert isinstance(decision, Stop) and decision.exit_code is expected
    else:
        assert isinstance(decision, Restart) and decision.failures_in_a_row == expected
