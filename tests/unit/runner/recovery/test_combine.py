"""One cause from the failures of several nodes."""

from __future__ import annotations

import pytest

from runner.recovery.failure import Failure, combine
from runner.recovery.kinds import FailureKind

K = FailureKind
PEER = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([K.FINISHED, K.FINISHED], K.FINISHED),
        ([K.PREEMPTED, K.PREEMPTED], K.PREEMPTED),
        ([K.FINISHED, K.PREEMPTED], K.PREEMPTED),
        ([K.FINISHED, K.NODE_LOST], K.NODE_LOST),
        ([K.ENDED, K.CRASHED], K.CRASHED),
        ([K.ENDED, K.NODE_LOST], K.NODE_LOST),
        ([K.NODE_LOST, K.OUT_OF_MEMORY], K.OUT_OF_MEMORY),
        ([K.HUNG, K.ENDED], K.HUNG),
        ([K.HUNG, K.NODE_LOST], K.NODE_LOST),
        ([K.HUNG, K.CRASHED], K.CRASHED),
        ([K.ENDED, K.BAD_NODE, K.ENDED], K.BAD_NODE),
        ([K.PREEMPTED, K.ENDED], K.ENDED),
    ],
)
def test_of_several_nodes_the_cause_takes_precedence_over_its_effects(
    kinds: list[FailureKind], expected: FailureKind
) -> None:
    failures = [Failure(kind, str(number), number, number) for number, kind in enumerate(kinds)]
    combined = combine(failures)
    assert combined.kind is expected and combined.step == len(kinds) - 1
    assert combined.cause in [str(number) for number, kind in enumerate(kinds) if kind is expected]


def test_a_lost_node_explains_a_lost_connection_and_a_rank_of_its_own_fault_both() -> None:
    effect = Failure(K.CRASHED, PEER, 0, 5)
    assert combine([effect, Failure(K.NODE_LOST, "node 1 is gone", None, 0)]).kind is K.NODE_LOST
    assert combine([effect, Failure(K.CRASHED, "rank 2: ValueError: x", 2, 5)]).rank == 2


def test_one_node_is_its_own_cause() -> None:
    failure = Failure(K.CRASHED, "rank 0: ValueError: x", 0, 5, "print", (3, 5), may_pass=True)
    assert combine([failure]) == failure
