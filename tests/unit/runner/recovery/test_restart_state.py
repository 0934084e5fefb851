"""What a new pod learns of the run's failures."""

from __future__ import annotations

import pytest

from runner.errors import ExitCode
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.recovery.policy import AttemptRecord, BatchDivision, Stop, decide
from runner.recovery.restart_state import RestartState


def failure(step: int = 3) -> Failure:
    return Failure(FailureKind.CRASHED, "cause", 1, step, "print")


def test_it_survives_being_written_down() -> None:
    spike = Failure(FailureKind.SPIKE, "cause", 0, 3, "LossSpike|3", (2, 3))
    history = [AttemptRecord(failure(), 2), AttemptRecord(spike, 2)]
    record = RestartState(history, BatchDivision(2, 4, 2, 16), running=7, skipped=[(5, 9), (12, 12)], finished="ab12")
    assert RestartState.from_json(record.to_json(7).encode()) == record
    assert RestartState.from_json(RestartState().to_json(0)) == RestartState()


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        b"",
        b"[]",
        b"3",
        b"{",
        b'{"history": [{}]}',
        b'{"batch": {"x": 1}}',
        b'{"running": "x"}',
        b"\xff",
        b'{"history": [{"failure": {"kind": "?"}, "committed_step": 1}]}',
        b"[" * 3000,
        b'{"history": 1e999}',
        b'{"running": 1e999}',
        # It would have ended the supervisor the next time that memory runs out.
        b'{"batch": {"micro_batch": "4"}}',
        b'{"batch": {"micro_batch": 0}}',
        b'{"batch": {"micro_batch": 4, "accumulation": 0}}',
        b'{"batch": {"divisor": 0}}',
        b'{"batch": {"divisor": true}}',
        b'{"batch": {"divisor": 1e30}}',
        b'{"batch": []}',
        b'{"skipped": [[3, 2]]}',
        b'{"skipped": [["1", 2]]}',
        b'{"skipped": [[1, 2, 3]]}',
        b'{"skipped": 7}',
        b'{"finished": 1}',
        b'{"history": [{"failure": {"kind": "crashed", "cause": "\\ud800", "rank": 0, "step": 1, "fingerprint": ""},'
        b' "committed_step": 1}]}',
    ],
)
def test_what_cannot_be_read_is_an_empty_record(damaged: bytes | None) -> None:
    assert RestartState.from_json(damaged) == RestartState()


def test_a_newly_committed_step_forgets_what_was_before() -> None:
    record = RestartState()
    for committed in (10, 10, 20, 20, 20):
        record.add(AttemptRecord(failure(), committed))
    assert [entry.committed_step for entry in record.history] == [10, 20, 20, 20]


def test_the_same_failure_twice_is_seen_across_a_new_commit() -> None:
    """The second attempt has come as far as the first one, and committed what it had in memory by then."""
    record = RestartState()
    for committed in (10, 12):
        record.add(AttemptRecord(failure(), committed))
    decision = decide(record.history, max_restarts=9, stop_requested=False)
    assert isinstance(decision, Stop) and decision.exit_code is ExitCode.DETERMINISTIC


def test_a_runner_that_ended_without_a_word_counts_once() -> None:
    record = RestartState(running=4)
    assert record.account_for_lost_runner(10)
    assert [entry.failure.kind for entry in record.history] == [FailureKind.RUNNER_LOST]
    assert not record.account_for_lost_runner(10) and len(record.history) == 1
