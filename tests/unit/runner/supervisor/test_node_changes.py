"""When a running attempt is paused for other nodes, and what its end is then; see test_membership.py for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.node_fakes import FakeNode, FakeSession

from checkpointing.agent.events import SlowRanks
from runner.errors import ExitCode
from runner.journal.events import NodesChanged
from runner.peers.messages import MAX_REASON, Finish
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.session.admission import Limits, Seen
from runner.supervisor.node_changes import NodeChanges, listed

ALL = frozenset({0, 1, 2})
LIMITS = Limits(2, 3, grow_interval_s=60)


class Bench:
    def __init__(self, folder: Path) -> None:
        self.session = FakeSession(folder)
        self.sent: list[tuple[int, Finish]] = []
        self.changes = NodeChanges(self.session, lambda message, number: self.sent.append((number, message)))
        self.node: Any = FakeNode(display=self.session.display, record=self.session.record)

    def watch(self, seen: Seen, limits: Limits = LIMITS) -> int:
        self.changes.watch(self.node, limits, seen)
        pauses: int = self.node.pauses
        return pauses


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_an_attempt_is_paused_once_and_the_next_one_anew(bench: Bench) -> None:
    bench.changes.on_stop(1, "SIGTERM", LIMITS, Seen(frozenset({0}), members=ALL))
    seen = Seen(frozenset({0}), members=ALL)
    assert [bench.watch(seen), bench.watch(seen)] == [1, 1]
    bench.changes.begin()
    assert bench.watch(seen) == 2


@pytest.mark.parametrize("reason", ["stop", "start-up", "fixed"])
def test_it_is_not_paused(reason: str, bench: Bench) -> None:
    bench.changes.leaving[1] = "SIGTERM"
    bench.node.is_training = reason != "start-up"
    if reason == "stop":
        bench.session.stop.ask("SIGINT")
    assert bench.watch(Seen(frozenset({0}), members=ALL), Limits(3, 3) if reason == "fixed" else LIMITS) == 0


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (FailureKind.PREEMPTED, FailureKind.NODES_CHANGED),
        (FailureKind.ENDED, FailureKind.NODES_CHANGED),
        (FailureKind.CRASHED, FailureKind.CRASHED),
        (FailureKind.FINISHED, FailureKind.FINISHED),
    ],
)
def test_only_an_end_that_the_pause_caused_is_a_change(kind: FailureKind, found: FailureKind, bench: Bench) -> None:
    bench.changes.leaving[1] = "SIGTERM"
    revised = bench.changes.revise(Failure(kind, "why", step=5), ALL)
    assert (revised.kind, revised.step) == (found, 5)
    # It may go, however the attempt has ended.
    ((number, message),) = bench.sent
    assert (number, message.exit_code) == (1, ExitCode.PREEMPTED.value)


def test_an_end_without_a_change_stays_what_it_is(bench: Bench) -> None:
    failure = Failure(FailureKind.PREEMPTED, "stopped", step=5)
    assert bench.changes.revise(failure, ALL) is failure and bench.sent == []


def test_a_reason_of_any_length_can_be_sent(bench: Bench) -> None:
    bench.changes.on_stop(3, "x" * 2 * MAX_REASON, LIMITS, Seen(ALL))
    assert len(bench.sent[0][1].reason) == MAX_REASON


def test_the_first_attempt_of_a_session_changes_nothing(bench: Bench) -> None:
    display: Any = bench.session.display
    bench.changes.take(ALL, None)
    bench.changes.take(ALL, ALL)
    assert bench.session.events == [] and display.texts == []
    bench.changes.take(frozenset({0, 2, 3}), ALL)
    assert bench.session.events == [NodesChanged(nodes=[0, 2, 3], came=[3], gone=[1])]
    assert display.texts == ["node 1 left out, node 3 admitted: training on 3 nodes"]


@pytest.mark.parametrize(
    ("limits", "seen", "leaving", "hands_over"),
    [
        (LIMITS, Seen(frozenset({0}), members=ALL), [], True),
        (LIMITS, Seen(ALL), [], True),
        # Enough, but one of them leaves too.
        (LIMITS, Seen(frozenset({0}), members=ALL), [2], False),
        (LIMITS, Seen(frozenset({0, 1})), [], False),
        (Limits(3, 3), Seen(ALL), [], False),
        # It is not the first node that leads.
        (LIMITS, Seen(frozenset({1}), members=ALL, leader=1), [], True),
    ],
)
def test_a_leader_that_is_to_stop_leaves_the_run_to_the_others(
    limits: Limits, seen: Seen, leaving: list[int], hands_over: bool, bench: Bench
) -> None:
    bench.changes.leaving.update(dict.fromkeys(leaving, "SIGTERM"))
    assert bench.changes.on_own_stop(limits, seen) is hands_over is bench.changes.hands_over


BAD = Failure(FailureKind.BAD_NODE, "ECC error")


def test_a_node_whose_hardware_fails_leaves_alone(bench: Bench) -> None:
    bench.changes.on_bad({2: BAD}, LIMITS, Seen(frozenset({0}), members=ALL), can_hand_over=True)
    failure = bench.changes.revise(BAD, ALL)
    assert failure.kind is FailureKind.NODES_CHANGED and failure.cause == "node 2 leaves: ECC error"
    ((number, end),) = bench.sent
    assert (number, end.exit_code) == (2, 80) and "continues without this node" in end.reason
    # It is asked to stop the next time for another reason.
    bench.changes.leaving.clear()
    bench.changes.on_stop(2, "SIGTERM", LIMITS, Seen(ALL))
    assert bench.sent[-1][1].exit_code == 75


@pytest.mark.parametrize("limits", [Limits(3, 3), Limits(2, 2)])
def test_without_enough_others_a_bad_node_ends_the_run(limits: Limits, bench: Bench) -> None:
    members = frozenset(range(limits.max_nodes))
    bench.changes.on_bad({1: BAD}, limits, Seen(frozenset({0}), members=members), can_hand_over=True)
    assert bench.changes.revise(BAD, members) is BAD and not bench.sent and not bench.changes.hands_over


@pytest.mark.parametrize("can_hand_over", [True, False])
def test_a_leader_whose_hardware_fails_leaves_the_run_to_the_others(can_hand_over: bool, bench: Bench) -> None:
    bench.changes.on_bad({0: BAD}, LIMITS, Seen(frozenset({0}), members=ALL), can_hand_over=can_hand_over)
    assert bench.changes.hands_over is can_hand_over and bench.changes.revise(BAD, ALL) is BAD


def test_numbers_are_listed_in_order() -> None:
    assert listed({10, 2}) == "2, 10"


SLOW = SlowRanks(ranks=[2, 4], ratios=[1.4, 1.9], nodes=[1, 2])


def with_eviction(bench: Bench, slow: SlowRanks = SLOW) -> Bench:
    bench.session.config.launch.evict_slow_nodes = True
    bench.node.checkpoints.handle(slow)
    return bench


def test_the_slowest_node_leaves_if_enough_are_left(bench: Bench) -> None:
    assert with_eviction(bench).watch(Seen(frozenset({0}), members=ALL)) == 1
    cause = "rank 4 needs 1.9 times as long as the median rank (launch.evict_slow_nodes)"
    # With two nodes at least, only one of them can go.
    assert bench.changes.leaving == {2: cause}
    assert bench.changes.evicted == {2: Failure(FailureKind.BAD_NODE, cause)}
    failure = bench.changes.revise(Failure(FailureKind.PREEMPTED, "paused"), ALL)
    assert (failure.kind, failure.cause) == (FailureKind.NODES_CHANGED, f"node 2 leaves: {cause}")
    ((number, end),) = bench.sent
    assert (number, end.exit_code) == (2, ExitCode.BAD_NODE.value)
    assert bench.changes.evicted == {}


def test_with_a_node_to_spare_all_slow_ones_leave(bench: Bench) -> None:
    assert with_eviction(bench).watch(Seen(frozenset({0, 3}), members=ALL)) == 1
    assert bench.changes.leaving.keys() == {1, 2}


@pytest.mark.parametrize("reason", ["not wished", "fixed", "too few", "leader", "gone", "none", "its data"])
def test_slow_nodes_stay(reason: str, bench: Bench) -> None:
    nodes = {"leader": [0, 0], "gone": [5, 6]}.get(reason, [1, 2])
    slow = (
        SlowRanks(ranks=[], ratios=[], nodes=[])
        if reason == "none"
        else SlowRanks(
            ranks=[2, 4], ratios=[1.4, 1.9], nodes=nodes, between_steps=[2, 4] if reason == "its data" else []
        )
    )
    with_eviction(bench, slow)
    bench.session.config.launch.evict_slow_nodes = reason != "not wished"
    limits = {"fixed": Limits(3, 3), "too few": Limits(3, 4, grow_interval_s=60)}.get(reason, LIMITS)
    assert bench.watch(Seen(frozenset({0}), members=ALL), limits) == 0
    assert bench.changes.leaving == {} == bench.changes.evicted
