from __future__ import annotations

import pytest

from runner.errors import ExitCode
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.recovery.policy import AttemptRecord, BatchDivision, Restart, Stop, backoff_s, decide, end_of_node

K = FailureKind


def record(kind: FailureKind = K.CRASHED, committed: int = -1, signature: str = "", step: int = 5) -> AttemptRecord:
    return AttemptRecord(Failure(kind, "cause", 0, step, signature), committed)


def passing(kind: FailureKind) -> AttemptRecord:
    return AttemptRecord(Failure(kind, "cause", 0, 0, may_pass=True), -1)


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
        ([record(K.BAD_NODE)], False, ExitCode.BAD_NODE),
        ([record(K.HUNG)], False, 1),
        ([record(K.NODE_LOST)], False, 1),
        ([record(K.RUNNER_LOST)] * 3, False, ExitCode.NO_PROGRESS),
        ([record(K.HUNG, 10), record(K.RUNNER_LOST, 10), record(K.NODE_LOST, 10)], False, ExitCode.BUDGET_SPENT),
        # Once more as it is, where that may have passed; then as ever.
        ([passing(K.BAD_NODE)], False, 1),
        ([passing(K.BAD_NODE)] * 2, False, ExitCode.BAD_NODE),
        # Bounded by what can be halved, not by the budget.
        ([record(K.OUT_OF_MEMORY, signature="a")] * 9, False, 0),
        ([record(K.OUT_OF_MEMORY), record()], False, 1),
        ([record(K.NO_VALID_CHECKPOINT)], False, ExitCode.NO_VALID_CHECKPOINT),
        ([record(K.CRASHED)], False, 1),
        ([record(K.AGENT_LOST)], False, 1),
        ([record(K.LAUNCHER_LOST)], False, 1),
        ([record(), record()], False, 2),
        ([record(), record(), record()], False, ExitCode.NO_PROGRESS),
        ([record(committed=10)] * 3, False, ExitCode.BUDGET_SPENT),
        # Bounded by a number of its own, and the first one waits, too.
        ([record(K.NETWORK)], False, 2),
        ([record(K.NETWORK)] * 4, False, 5),
        ([record(K.NETWORK)] * 5, False, ExitCode.BUDGET_SPENT),
        ([record(K.NETWORK)] * 4 + [record()], False, 1),
        ([record(K.NETWORK)] * 4 + [record(K.NETWORK, 10)], False, 2),
        # A new commit refills the budget.
        ([record(committed=10), record(committed=10), record(committed=20, step=21)], False, 1),
        ([record(committed=c, step=c + 1) for c in range(50)], False, 1),
        # Checkpoints that come nearer to where it hangs are no way past it (27 attempts were made at one step).
        ([record(K.HUNG, c, step=51) for c in (2, 4)], False, 2),
        ([record(K.HUNG, c, step=51) for c in (2, 4, 6)], False, ExitCode.BUDGET_SPENT),
        ([record(K.HUNG, 2, step=51), record(K.CRASHED, 4, step=51), record(K.HUNG, 6, step=51)], False, 1),
        ([record(K.HUNG, c, step=0) for c in (2, 4, 6)], False, 1),
        # The same error at the same step twice is deterministic; another one in between resets the count.
        ([record(signature="a"), record(signature="a")], False, ExitCode.DETERMINISTIC),
        ([record(signature="a"), record(signature="b")], False, 2),
    ],
)
def test_decision(history: list[AttemptRecord], stop_requested: bool, expected: ExitCode | int) -> None:
    decision = decide(history, max_restarts=2, stop_requested=stop_requested, max_network_retries=4)
    if isinstance(expected, ExitCode):
        assert isinstance(decision, Stop) and decision.exit_code is expected
    else:
        assert isinstance(decision, Restart) and decision.failures_in_a_row == expected


def test_a_bad_step_is_passed_over_the_second_time_as_often_as_may_be() -> None:
    bad = AttemptRecord(Failure(K.NON_FINITE, "cause", 0, 5, "NonFinite|6", (4, 6)), 3)
    first = decide([bad], max_restarts=9, stop_requested=False, skips_left=1)
    assert isinstance(first, Restart) and first.skip is None
    # However small the budget: it is bounded by itself.
    again = decide([bad, bad], max_restarts=0, stop_requested=False, skips_left=1)
    assert isinstance(again, Restart) and again.skip == (4, 6) and "steps 4 to 6 are skipped" in again.reason
    end = decide([bad, bad], max_restarts=9, stop_requested=False, skips_left=0)
    assert isinstance(end, Stop) and end.exit_code is ExitCode.DETERMINISTIC


def out_of_memory(shape: BatchDivision) -> Restart | Stop:
    return decide([record(K.OUT_OF_MEMORY)], max_restarts=0, stop_requested=False, batch=shape)


def test_out_of_memory_halves_until_nothing_is_left() -> None:
    shape, seen = BatchDivision(8, 1), []
    while isinstance(
        decision := decide([record(K.OUT_OF_MEMORY)], max_restarts=0, stop_requested=False, batch=shape), Restart
    ):
        shape = decision.batch
        seen.append((shape.micro_batch, shape.accumulation, shape.divisor))
        assert f"micro-batch {shape.micro_batch} x accumulation {shape.accumulation}" in decision.reason
    assert seen == [(4, 2, 2), (2, 4, 4), (1, 8, 8)]
    assert decision.exit_code is ExitCode.DETERMINISTIC and "nothing left to halve" in decision.reason


def test_memory_that_was_short_before_a_step_had_ended_halves_nothing_the_first_time() -> None:
    early, shape = passing(K.OUT_OF_MEMORY), BatchDivision(8, 1)
    first = decide([early], max_restarts=0, stop_requested=False, batch=shape)
    assert isinstance(first, Restart) and first.batch == shape and first.reason == "cause: retrying once as it is"
    second = decide([early, early], max_restarts=0, stop_requested=False, batch=shape)
    assert isinstance(second, Restart) and second.batch == BatchDivision(4, 2, 2)


def test_a_script_that_does_not_say_its_batch_is_halved_a_bounded_number_of_times() -> None:
    shape, count = BatchDivision(), 0
    while isinstance(
        decision := decide([record(K.OUT_OF_MEMORY)], max_restarts=0, stop_requested=False, batch=shape), Restart
    ):
        shape, count = decision.batch, count + 1
    assert count == 6 and decision.exit_code is ExitCode.DETERMINISTIC


def test_a_script_that_does_not_cut_its_batches_fails_as_any_other() -> None:
    short = record(K.OUT_OF_MEMORY, signature="a")
    first = decide([short], max_restarts=3, stop_requested=False, can_cut=False)
    assert isinstance(first, Restart) and first.batch == BatchDivision() and first.reason == "cause"
    second = decide([short, short], max_restarts=3, stop_requested=False, can_cut=False)
    assert isinstance(second, Stop) and second.exit_code is ExitCode.DETERMINISTIC
    # The kernel's kills look alike at every step; they cost budget.
    last = decide([record(K.OUT_OF_MEMORY)] * 4, max_restarts=3, stop_requested=False, can_cut=False)
    assert isinstance(last, Stop) and last.exit_code is ExitCode.NO_PROGRESS


def test_other_failures_leave_the_batch_as_it_is() -> None:
    decision = decide([record()], max_restarts=1, stop_requested=False, batch=BatchDivision(2, 2, 2))
    assert isinstance(decision, Restart) and decision.batch == BatchDivision(2, 2, 2)


def test_backoff_begins_with_the_second_failure_and_doubles() -> None:
    waits = [backoff_s(n, initial_s=1.0, max_s=60.0, jitter_s=0.0) for n in range(9)]
    assert waits == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    jittered = {backoff_s(2, initial_s=1.0, max_s=60.0, jitter_s=1.0) for _ in range(50)}
    assert len(jittered) > 1 and all(1.0 <= wait <= 2.0 for wait in jittered)
    assert backoff_s(5000, initial_s=1.0, max_s=60.0, jitter_s=1.0) == 60.0


def test_only_the_bad_node_ends_as_one() -> None:
    end = Stop(ExitCode.BAD_NODE, "this node is at fault; start the run on another one: rank 3: ECC error")
    assert end_of_node(end, 1, {1, 2}) is end
    other = end_of_node(end, 0, {1, 2})
    assert other.exit_code is ExitCode.PREEMPTED
    assert other.reason.startswith("node 1, 2 is at fault") and other.reason.endswith("rank 3: ECC error")
    # One node alone, and every other end.
    assert end_of_node(end, 0, ()) is end
    spent = Stop(ExitCode.BUDGET_SPENT, "4 failures")
    assert end_of_node(spent, 0, {1}) is spent


@pytest.mark.parametrize("can_cut", [True, False])
def test_memory_that_an_evaluation_lacks_cuts_nothing(can_cut: bool) -> None:
    short, shape = record(K.MEMORY_OUTSIDE_STEPS, signature="a"), BatchDivision(8, 1)
    once = decide([short], max_restarts=3, stop_requested=False, batch=shape, can_cut=can_cut)
    assert isinstance(once, Restart) and once.batch == shape
    twice = decide([short] * 2, max_restarts=3, stop_requested=False, batch=shape, can_cut=can_cut)
    assert isinstance(twice, Stop) and twice.exit_code is ExitCode.DETERMINISTIC
