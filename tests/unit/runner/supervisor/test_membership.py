"""How the leader treats other nodes, without a connection."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Any

import pytest
from helpers.node_fakes import FakeLeader, FakeNode, FakeSession

from checkpointing.agent.events import Event, Log
from checkpointing.storage.sidecars import LocalSidecars
from runner.errors import ExitCode, PeersMissing, UsageError
from runner.journal.attempts import AttemptSpec
from runner.journal.events import NodesChanged, WaitingForNodes
from runner.lease.leadership import Leadership
from runner.lease.lease import Lease, LeaseRecord
from runner.peers.auth import read_secret
from runner.peers.messages import Begin, Busy, End, Ended, Finish, Forwarded, Hello, Ready, StopRun, Welcome
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.recovery.policy import Stop
from runner.recovery.restart_state import FINISHED_PATIENCE_S
from runner.session.admission import Limits
from runner.session.identity import JobIdentity
from runner.supervisor.membership import _PEER_END_S, Membership

OURS = JobIdentity({"job": "the configured job", "data.path": "a.parquet", "trainer.learning_rate": 1e-4})


class Bench:
    """A leader of three nodes with two ranks each."""

    def __init__(self, folder: Path, keeper: Lease | None = None, **launch: Any) -> None:
        self.session = FakeSession(folder, nnodes=3, master_addr="127.0.0.1", master_port=29400, **launch)
        self.session.attempt = 1
        self.leader = FakeLeader()
        self.node: Any = FakeNode(display=self.session.display, record=self.session.record)
        self.events: list[Event] = []
        self.refusal: Any = None
        lead = Leadership(self.session, keeper)
        self.members = Membership(
            self.session, identity=OURS, on_event=self.events.append, lead=lead, open_leader=self._open
        )

    def _open(self, address: Any, num_nodes: int, loop: Any, receive: Any, refusal: Any, **options: Any) -> Any:
        self.options = options
        self.receive, self.refusal = receive, refusal
        return self.leader

    def come(self, *numbers: int) -> None:
        """Nodes connect, and their processes are up."""
        for number in numbers:
            self.leader.present.add(number)
            self.receive(number, Hello(node_rank=number))
            self.receive(number, Ready(nproc=2))

    def gather(self) -> None:
        self.session.loop.plan = [lambda: self.come(1, 2)]  # type: ignore[attr-defined]
        self.members.gather(Limits(3, 3, local_ranks=2), has_finished=False)

    def begin(self) -> None:
        self.gather()
        self.members.begin(AttemptSpec(1, 3))
        self.leader.sent.clear()

    def end_on(self, number: int, kind: FailureKind, cause: str = "why", step: int = 5, *, attempt: int = 1) -> None:
        self.receive(number, Ended(attempt=attempt, failure=Failure(kind, cause, step=step)))

    @property
    def sent(self) -> list[object]:
        return [message for _, message in self.leader.sent]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_run_of_one_node_has_nobody_to_wait_for(bench: Bench) -> None:
    bench.members.gather(Limits(1, 1, local_ranks=2), has_finished=False)
    bench.members.begin(AttemptSpec(1, 1))
    bench.members.turn(bench.node)
    own = Failure(FailureKind.CRASHED, "why", step=5)
    assert bench.members.join(own) == own and bench.node.verdicts == []
    bench.members.dismiss(Stop(ExitCode.DONE, "done"))
    assert bench.sent == [] and not bench.members.has_others


def test_an_attempt_begins_once_all_nodes_are_ready(bench: Bench) -> None:
    bench.begin()
    assert bench.session.events == []
    bench.members.turn(bench.node)
    assert bench.node.verdicts == []


def test_missing_nodes_are_named_and_given_up_after_the_timeout(bench: Bench) -> None:
    bench.session.loop.plan = [lambda: bench.come(1)]  # type: ignore[attr-defined]
    began = bench.session.host.now
    with pytest.raises(PeersMissing, match="node 2 of 3 has not connected within"):
        bench.members.gather(Limits(3, 3, local_ranks=2), has_finished=False)
    assert bench.session.host.now - began >= bench.session.config.launch.rendezvous_timeout_s
    assert bench.session.events == [WaitingForNodes(nodes=[2])]


def test_nodes_of_a_finished_run_are_not_waited_for_long(bench: Bench) -> None:
    began = bench.session.host.now
    with pytest.raises(PeersMissing):
        bench.members.gather(Limits(3, 3, local_ranks=2), has_finished=True)
    assert bench.session.host.now - began <= FINISHED_PATIENCE_S + 1


def test_a_stop_request_ends_the_waiting(bench: Bench) -> None:
    bench.session.loop.plan = [lambda: bench.session.stop.ask("SIGTERM")]  # type: ignore[attr-defined]
    bench.members.gather(Limits(3, 3, local_ranks=2), has_finished=False)


def test_a_port_that_is_taken_is_named(bench: Bench) -> None:
    def taken(*_: object, **__: object) -> Any:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    bench.members._open_leader = taken
    with pytest.raises(UsageError, match=r"launch\.peer_port: port 29401 cannot be used \(Address already in use\)"):
        bench.members.gather(Limits(3, 3, local_ranks=2), has_finished=False)


def test_another_node_must_do_the_same_job(bench: Bench) -> None:
    """Another learning rate, or other data, on one node was not noticed."""
    bench.gather()

    def refusal(job: str) -> str | None:
        answer: Finish | None = bench.refusal(Hello(node_rank=1, job=job))
        return answer.reason if answer is not None else None

    assert refusal(OURS.to_json().decode()) is None
    other = JobIdentity({**OURS.what, "trainer.learning_rate": 2e-4})
    reason = refusal(other.to_json().decode())
    assert reason is not None and "(trainer.learning_rate: 0.0001 -> 0.0002)" in reason and "--allow-changes" in reason
    # It was started with --allow-changes, or is of another version.
    assert refusal("") is None is refusal("{}")


def test_another_node_must_have_as_many_ranks(bench: Bench) -> None:
    bench.gather()
    bench.leader.sent.clear()
    bench.receive(1, Ready(nproc=3))
    text = "this node has 3 ranks, the leader 2; use the same --nproc-per-node everywhere"
    assert bench.leader.sent == [(1, Finish(exit_code=2, reason=text))]


def test_a_node_is_welcomed_with_the_runs_id(bench: Bench) -> None:
    bench.gather()
    assert (1, Welcome(run_id="run")) in bench.leader.sent


def test_a_node_learns_whether_the_others_train(bench: Bench) -> None:
    bench.begin()
    bench.receive(7, Hello(node_rank=7))
    assert bench.leader.sent[-1] == (7, Welcome(run_id="run", running=True))
    # It takes part already: the others wait for it.
    bench.receive(1, Hello(node_rank=1))
    assert bench.leader.sent[-1] == (1, Welcome(run_id="run"))


def test_a_node_that_is_lost_ends_the_attempt(bench: Bench) -> None:
    bench.begin()
    bench.leader.present.discard(2)
    bench.members.turn(bench.node)
    assert [(verdict.kind, verdict.cause) for verdict in bench.node.verdicts] == [
        (FailureKind.NODE_LOST, "node 2 is gone, or silent for too long")
    ]


def test_a_node_that_comes_back_in_mid_attempt_was_lost(bench: Bench) -> None:
    """Its connection may never have been seen to end."""
    bench.begin()
    bench.receive(1, Hello(node_rank=1))
    bench.members.turn(bench.node)
    assert "node 1 was lost and has come back" in bench.node.verdicts[-1].cause


@pytest.mark.parametrize(("kind", "stacks"), [(FailureKind.CRASHED, False), (FailureKind.HUNG, True)])
def test_a_failure_elsewhere_ends_the_attempt_here(kind: FailureKind, stacks: bool, bench: Bench) -> None:
    bench.begin()
    bench.end_on(1, kind, "rank 3: ValueError")
    bench.members.turn(bench.node)
    (verdict,) = bench.node.verdicts
    assert (verdict.kind, bench.node.stacks) == (FailureKind.ENDED, [stacks])
    assert verdict.cause == "ended with another node's ranks: rank 3: ValueError"


def test_what_is_said_of_another_attempt_does_not_count(bench: Bench) -> None:
    bench.begin()
    bench.end_on(1, FailureKind.CRASHED, attempt=7)
    bench.receive(1, Forwarded(attempt=7, event=Log(step=3, loss=1.0)))
    bench.members.turn(bench.node)
    assert bench.node.verdicts == [] == bench.events
    bench.receive(1, Forwarded(attempt=1, event=Log(step=3, loss=1.0)))
    assert bench.events == [Log(step=3, loss=1.0)]


def test_all_nodes_learn_that_one_is_busy_once(bench: Bench) -> None:
    """A node that waits for one that compiles or saves must not take that for a hang."""
    bench.begin()
    bench.members.turn(bench.node)
    assert bench.sent == [] and not bench.node.others_busy
    bench.receive(2, Busy(busy=True))
    for _ in range(3):
        bench.members.turn(bench.node)
    assert bench.sent == [Busy(busy=True)] and bench.node.others_busy
    bench.receive(2, Busy(busy=False))
    bench.node.busy = True
    bench.members.turn(bench.node)
    assert bench.sent == [Busy(busy=True)] and not bench.node.others_busy


def test_a_stop_request_passes_through_the_leader(bench: Bench) -> None:
    bench.begin()
    bench.receive(2, StopRun(reason="SIGTERM"))
    assert bench.session.stop.reason == "node 2: SIGTERM"
    bench.members.announce_stop(bench.session.stop.reason)
    assert bench.sent == [StopRun(reason="node 2: SIGTERM")]


def test_a_leader_with_a_lease_leaves_without_stopping_the_others(tmp_path: Path) -> None:
    keeper = Lease(LocalSidecars(tmp_path, may_create=lambda: True), LeaseRecord(4, "a", run_id="the-run"))
    bench = Bench(tmp_path, keeper, min_nodes=1)
    bench.session.loop.plan = [lambda: bench.come(1, 2)]  # type: ignore[attr-defined]
    bench.members.gather(Limits(1, 3, last_call_s=30, local_ranks=2), has_finished=False)
    assert Welcome(run_id="the-run", epoch=4) in bench.sent
    bench.members.begin(AttemptSpec(1, 3))
    bench.leader.sent.clear()
    bench.session.stop.ask("SIGTERM")
    bench.members.announce_stop("SIGTERM")
    bench.members.dismiss(Stop(ExitCode.PREEMPTED, "stopped on request"))
    assert bench.sent == [] and bench.leader.closed


def test_a_leader_that_fails_while_it_leaves_ends_the_run(tmp_path: Path) -> None:
    keeper = Lease(LocalSidecars(tmp_path, may_create=lambda: True), LeaseRecord(4, "a", run_id="the-run"))
    bench = Bench(tmp_path, keeper, min_nodes=1)
    bench.session.loop.plan = [lambda: bench.come(1, 2)]  # type: ignore[attr-defined]
    bench.members.gather(Limits(1, 3, last_call_s=30, local_ranks=2), has_finished=False)
    bench.leader.sent.clear()
    bench.session.stop.ask("SIGTERM")
    bench.members.announce_stop("SIGTERM")
    bench.members.dismiss(Stop(ExitCode.DETERMINISTIC, "why"))
    assert [type(message) for message in bench.sent] == [Finish, Finish]


def test_an_attempt_is_over_when_every_node_has_reported(bench: Bench) -> None:
    bench.begin()
    plan: Any = bench.session.loop
    plan.plan = [
        lambda: bench.end_on(1, FailureKind.FINISHED, step=9),
        lambda: bench.end_on(2, FailureKind.FINISHED, step=9),
    ]
    joined = bench.members.join(Failure(FailureKind.FINISHED, "all ranks finished", step=9))
    assert joined.kind is FailureKind.FINISHED and bench.sent == []


def test_a_failure_here_ends_the_attempt_elsewhere_at_once(bench: Bench) -> None:
    bench.begin()
    loop: Any = bench.session.loop
    loop.plan = [lambda: bench.end_on(1, FailureKind.ENDED), lambda: bench.end_on(2, FailureKind.ENDED)]
    joined = bench.members.join(Failure(FailureKind.HUNG, "rank 0 hung", step=4))
    assert bench.sent == [End(attempt=1, stacks=True)]
    assert (joined.kind, joined.cause, joined.step) == (FailureKind.HUNG, "rank 0 hung", 5)


def test_the_cause_is_found_among_all_nodes(bench: Bench) -> None:
    bench.begin()
    bench.end_on(1, FailureKind.CRASHED, "rank 2: RuntimeError: connection reset by peer")
    bench.end_on(2, FailureKind.OUT_OF_MEMORY, "rank 4: out of memory")
    own = Failure(FailureKind.CRASHED, "rank 0: RuntimeError: connection closed", step=5)
    assert bench.members.join(own).kind is FailureKind.OUT_OF_MEMORY


def test_a_node_that_never_reports_counts_as_lost_after_half_a_minute(bench: Bench) -> None:
    bench.begin()
    bench.end_on(1, FailureKind.ENDED)
    began = bench.session.host.now
    joined = bench.members.join(Failure(FailureKind.CRASHED, "connection reset by peer", step=5))
    assert (joined.kind, joined.cause) == (FailureKind.NODE_LOST, "node 2 is gone, or silent for too long")
    assert _PEER_END_S <= bench.session.host.now - began < _PEER_END_S + 1


def test_nodes_that_save_have_the_grace_period_as_well(bench: Bench) -> None:
    bench.begin()
    began = bench.session.host.now
    bench.members.join(Failure(FailureKind.PREEMPTED, "stopped", step=5))
    assert bench.session.host.now - began > _PEER_END_S + bench.session.config.restart.grace_s
    assert bench.sent == [End(attempt=1, stacks=False)]


def test_a_failure_elsewhere_shortens_the_wait_for_the_others(bench: Bench) -> None:
    """This node ended well and would wait for its grace period; one that fails ends that."""
    bench.begin()
    loop: Any = bench.session.loop
    loop.plan = [lambda: bench.end_on(1, FailureKind.CRASHED, "rank 2: ValueError")]
    began = bench.session.host.now
    joined = bench.members.join(Failure(FailureKind.PREEMPTED, "stopped", step=5))
    assert joined.cause == "rank 2: ValueError" and bench.sent == [End(attempt=1, stacks=False)]
    assert bench.session.host.now - began < _PEER_END_S + 1


def test_only_the_bad_node_leaves(bench: Bench) -> None:
    bench.begin()
    bench.end_on(1, FailureKind.ENDED)
    bench.end_on(2, FailureKind.BAD_NODE, "uncorrectable ECC error")
    joined = bench.members.join(Failure(FailureKind.ENDED, "ended with another node's ranks"))
    assert joined.kind is FailureKind.BAD_NODE and bench.members.bad_nodes == {2}
    bench.leader.sent.clear()
    bench.members.dismiss(Stop(ExitCode.BAD_NODE, "this node is at fault: uncorrectable ECC error"))
    ends = {number: message for number, message in bench.leader.sent if isinstance(message, Finish)}
    assert {number: message.exit_code for number, message in ends.items()} == {1: 75, 2: 80}
    assert ends[1].reason.startswith("node 2 is at fault") and ends[1].reason.endswith("ECC error")
    assert bench.leader.closed and not bench.members.has_others


def test_without_a_decision_the_nodes_are_only_disconnected(bench: Bench) -> None:
    bench.begin()
    bench.members.dismiss(None)
    assert bench.sent == [] and bench.leader.closed


def test_an_attempt_begins_on_all_nodes(bench: Bench) -> None:
    bench.gather()
    bench.members.begin(AttemptSpec(1, 3))
    assert bench.leader.sent[-2:] == [(number, Begin(spec=AttemptSpec(1, 3))) for number in (1, 2)]


@pytest.mark.parametrize(
    "error", [OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address"), socket.gaierror(-2, "Name not known")]
)
def test_an_address_that_this_node_does_not_have_is_named(error: OSError, tmp_path: Path) -> None:
    bench = Bench(tmp_path, peer_bind="192.0.2.1")

    def absent(*_: object, bind: str, **__: object) -> Any:
        assert bind == "192.0.2.1"
        raise error

    bench.members._open_leader = absent
    with pytest.raises(UsageError, match=r"launch\.peer_bind: '192\.0\.2\.1' is not an address of this node"):
        bench.members.gather(Limits(3, 3, local_ranks=2), has_finished=False)


def test_the_port_is_for_those_who_know_the_runs_secret(bench: Bench) -> None:
    bench.gather()
    assert bench.options["secret"] == read_secret(bench.session.config.tiers.durable)
    display: Any = bench.session.display
    bench.options["warn"]("refused a connection from 10.0.0.9: it has another secret")
    assert display.texts[-1].startswith("refused a connection from 10.0.0.9")


# -- runs whose number of nodes may change ---------------------------------------------------------------------------

ELASTIC = Limits(2, 3, last_call_s=30, grow_interval_s=60, local_ranks=2)


def kinds(bench: Bench, kind: type) -> dict[int | None, Any]:
    return {number: message for number, message in bench.leader.sent if isinstance(message, kind)}


def gather_elastic(bench: Bench, *plan: Any) -> None:
    loop: Any = bench.session.loop
    loop.plan = list(plan)
    bench.members.gather(ELASTIC, has_finished=False)


def begin_elastic(bench: Bench) -> None:
    gather_elastic(bench, lambda: bench.come(1, 2))
    bench.members.begin(AttemptSpec(1, 3, max_nodes=3))
    bench.leader.sent.clear()


def test_it_begins_with_those_that_have_come_by_the_last_call(bench: Bench) -> None:
    began = bench.session.host.now
    gather_elastic(bench, lambda: bench.come(2))
    assert bench.members.nodes == {0, 2} and 30 <= bench.session.host.now - began < 32
    bench.members.begin(AttemptSpec(1, 2, max_nodes=3))
    assert kinds(bench, Begin).keys() == {2}


def test_too_few_are_given_up_after_the_timeout(bench: Bench) -> None:
    with pytest.raises(PeersMissing, match="2 nodes are enough"):
        gather_elastic(bench)


def test_after_a_loss_the_others_go_on_without_waiting(bench: Bench) -> None:
    begin_elastic(bench)
    bench.leader.present.discard(1)
    bench.members.turn(bench.node)
    assert bench.node.verdicts[-1].kind is FailureKind.NODE_LOST
    bench.end_on(2, FailureKind.ENDED)
    joined = bench.members.join(Failure(FailureKind.NODE_LOST, "node 1 is gone"))
    assert joined.kind is FailureKind.NODE_LOST
    began = bench.session.host.now
    # Its processes are up again before the leader has decided anything, or a moment later.
    gather_elastic(bench, lambda: bench.receive(2, Ready(nproc=2)))
    assert bench.members.nodes == {0, 2} and bench.session.host.now - began < 1
    assert bench.session.events[-1] == NodesChanged(nodes=[0, 2], came=[], gone=[1])
    bench.leader.sent.clear()
    bench.members.begin(AttemptSpec(2, 2, max_nodes=3))
    assert kinds(bench, Begin).keys() == {2}
    # Node 1 is not part of this attempt: that it is away, or comes back, ends nothing.
    bench.node.verdicts.clear()
    bench.receive(1, Hello(node_rank=1))
    bench.members.turn(bench.node)
    assert bench.node.verdicts == []


def test_a_node_that_comes_is_admitted_at_a_step_boundary(bench: Bench) -> None:
    gather_elastic(bench, lambda: bench.come(1))
    bench.members.begin(AttemptSpec(1, 2, max_nodes=3))
    bench.come(2)
    bench.members.turn(bench.node)
    assert bench.node.pauses == 0, "the nodes have changed a moment ago"
    bench.session.host.now += ELASTIC.grow_interval_s
    bench.node.is_training = False
    bench.members.turn(bench.node)
    assert bench.node.pauses == 0, "nothing would be saved yet"
    bench.node.is_training = True
    for _ in range(3):
        bench.members.turn(bench.node)
    assert bench.node.pauses == 1
    bench.end_on(1, FailureKind.PREEMPTED)
    joined = bench.members.join(Failure(FailureKind.PREEMPTED, "stopped on request", step=5))
    assert (joined.kind, joined.cause, joined.step) == (FailureKind.NODES_CHANGED, "node 2 has come", 5)
    gather_elastic(bench, lambda: bench.receive(1, Ready(nproc=2)))
    assert bench.members.nodes == {0, 1, 2}
    assert bench.session.events[-1] == NodesChanged(nodes=[0, 1, 2], came=[2], gone=[])


def test_a_node_that_is_asked_to_stop_leaves_alone(bench: Bench) -> None:
    begin_elastic(bench)
    bench.receive(1, StopRun(reason="SIGTERM"))
    assert not bench.session.stop
    bench.members.turn(bench.node)
    assert bench.node.pauses == 1 and bench.node.verdicts == []
    bench.end_on(1, FailureKind.PREEMPTED)
    bench.end_on(2, FailureKind.PREEMPTED)
    joined = bench.members.join(Failure(FailureKind.PREEMPTED, "stopped on request", step=5))
    assert (joined.kind, joined.cause) == (FailureKind.NODES_CHANGED, "node 1 leaves: SIGTERM")
    finish = kinds(bench, Finish)
    assert finish.keys() == {1} and finish[1].exit_code == 75
    assert finish[1].reason == "SIGTERM; the run continues without this node"
    gather_elastic(bench, lambda: bench.receive(2, Ready(nproc=2)))
    assert bench.members.nodes == {0, 2}
    # It is started again, and welcome.
    bench.leader.present.discard(1)
    bench.members.check()
    bench.come(1)
    assert 1 in bench.members._seen().ready


def test_its_ranks_may_stop_before_the_leader_turns(bench: Bench) -> None:
    begin_elastic(bench)
    bench.receive(1, StopRun(reason="a signal to rank 2"))
    for number in (1, 2):
        bench.end_on(number, FailureKind.PREEMPTED)
    joined = bench.members.join(Failure(FailureKind.PREEMPTED, "stopped on request", step=5))
    assert (joined.kind, joined.cause) == (FailureKind.NODES_CHANGED, "node 1 leaves: a signal to rank 2")


def test_where_too_few_would_be_left_all_stop(bench: Bench) -> None:
    gather_elastic(bench, lambda: bench.come(1))
    bench.members.begin(AttemptSpec(1, 2, max_nodes=3))
    bench.receive(1, StopRun(reason="SIGTERM"))
    assert bench.session.stop.reason == "node 1: SIGTERM"


def test_two_that_leave_together_stop_the_run(bench: Bench) -> None:
    begin_elastic(bench)
    bench.receive(1, StopRun(reason="SIGTERM"))
    bench.receive(2, StopRun(reason="SIGTERM"))
    assert bench.session.stop.reason == "node 2: SIGTERM"


def test_a_spare_that_leaves_disturbs_nobody(bench: Bench) -> None:
    gather_elastic(bench, lambda: bench.come(1))
    bench.members.begin(AttemptSpec(1, 2, max_nodes=3))
    bench.come(2)
    bench.receive(2, StopRun(reason="SIGTERM"))
    assert kinds(bench, Finish)[2].exit_code == 75
    bench.members.turn(bench.node)
    assert bench.node.pauses == 0 and not bench.session.stop


def test_a_stop_of_the_run_is_no_change_of_nodes(bench: Bench) -> None:
    begin_elastic(bench)
    bench.receive(1, StopRun(reason="SIGTERM"))
    bench.session.stop.ask("SIGINT")
    for number in (1, 2):
        bench.end_on(number, FailureKind.PREEMPTED)
    assert bench.members.join(Failure(FailureKind.PREEMPTED, "stopped", step=5)).kind is FailureKind.PREEMPTED


def test_a_run_of_a_fixed_size_stops_as_before(bench: Bench) -> None:
    bench.begin()
    bench.receive(1, StopRun(reason="SIGTERM"))
    assert bench.session.stop.reason == "node 1: SIGTERM"
