"""The other nodes of a run, as the leader sees them: who is connected and ready, and how an attempt ended there."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import replace

from checkpointing.agent.events import Event
from runner.errors import ExitCode, PeersMissing
from runner.journal.attempts import AttemptSpec
from runner.journal.events import WaitingForNodes
from runner.lease.leadership import Leadership
from runner.node.node import Node
from runner.peers import messages
from runner.peers.link import Leader
from runner.peers.port import listen
from runner.recovery.failure import Failure, combine
from runner.recovery.kinds import FailureKind
from runner.recovery.policy import Stop, end_of_node
from runner.recovery.restart_state import FINISHED_PATIENCE_S
from runner.session.admission import Limits, Seen, admit
from runner.session.bad_machines import Exclusion
from runner.session.identity import JobIdentity
from runner.session.session import Session
from runner.supervisor.node_changes import NodeChanges, listed

TURN_S = 0.5
# When this node's part of an attempt is over, the other runners kill theirs; a node that takes longer counts as lost.
_PEER_END_S = 30.0
_JOIN_TURN_S = 0.05
# With these a leader may leave the run to another one.
_LEAVES = (ExitCode.PREEMPTED, ExitCode.BAD_NODE)


class Membership:
    """Gathers the other nodes, keeps attempts in step, and combines how they ended; with one node, it does nothing.

    Until `gather`, this node is alone. The others must share the identity of the job; without one, any is accepted. Of
    those that are `expected`, it is known that they followed the leader before this one.

    Attributes:
        nodes: Node ranks of those that take part in the newest attempt, or the next one.
        bad_nodes: Nodes whose hardware or driver failed in the newest attempt.
        limits: How many nodes the run may have.
    """

    def __init__(
        self,
        session: Session,
        *,
        identity: JobIdentity | None,
        on_event: Callable[[Event], None],
        lead: Leadership | None = None,
        expected: AbstractSet[int] = frozenset(),
        open_leader: Callable[..., Leader] = Leader,
    ) -> None:
        self._session, self._config, self._identity = session, session.config, identity
        self._on_event, self._open_leader, lead = on_event, open_leader, lead or Leadership(session, None)
        self._leader: Leader | None = None
        self.limits = Limits(1, 1)
        self._own, self._expected = session.config.launch.node_rank, frozenset(expected)
        self._welcome, self._host = messages.Welcome(run_id=lead.run_id, epoch=lead.epoch), lead.host
        self.nodes: frozenset[int] = frozenset({self._own})
        self._has_begun = False
        # Nodes whose processes are up, and how the running attempt has ended on those where it has.
        self._ready: set[int] = set()
        self._with_state: set[int] = set()
        self._ended: dict[int, Failure] = {}
        self._running = False
        self._busy: dict[int, bool] = {}
        self._busy_sent = False
        self.bad_nodes: set[int] = set()
        self._changes, self._exclusion = NodeChanges(session, self._send), Exclusion(session.config, session.clock)

    @property
    def others(self) -> frozenset[int]:
        """Node ranks of the nodes that take part, except the leader."""
        return self.nodes - {self._own}

    @property
    def hold_state(self) -> bool:
        """Whether another node that takes part may hold a snapshot."""
        return bool(self.others & self._with_state)

    @property
    def has_others(self) -> bool:
        """Whether other nodes take part and can be reached."""
        return self._leader is not None

    # -- before an attempt -------------------------------------------------------------------------------------------

    def gather(self, limits: Limits, *, has_finished: bool, each_turn: Callable[[], None] = lambda: None) -> None:
        """Wait until enough nodes, each with as many ranks as this one, are ready, or a stop is requested.

        The wait is short if the job `has_finished` in an earlier session: nodes that have exited with 0 do not start
        again.
        `each_turn` is called about twice per second; what it raises ends the wait.

        Raises:
            UsageError: The port is taken, or RUNNER_SECRET is too short.
            PeersMissing: Not enough have come in time.
            OSError: Storage refused the secret of the run.
        """
        self.limits = limits
        if limits.max_nodes == 1:
            return
        session, launch = self._session, self._config.launch
        if self._leader is None:
            num_nodes = None if limits.is_elastic else limits.max_nodes
            self._exclusion.load()
            identity, open_leader, receive = self._identity, self._open_leader, self._on_message
            self._leader = listen(session, num_nodes, receive, identity, self._exclusion, open_leader, self._host)
            session.loop.every(TURN_S, self.check)
        patience_s = min(launch.rendezvous_timeout_s, FINISHED_PATIENCE_S if has_finished else math.inf)
        began, enough_since, announced = session.monotonic(), math.inf, False
        while not session.stop:
            each_turn()
            self.check()
            now, seen = session.monotonic(), self._seen()
            enough = limits.fitting(len(seen.ready)) is not None
            enough_since = min(enough_since, now) if enough else math.inf
            chosen = admit(limits, seen, enough_s=max(now - enough_since, 0.0))
            if chosen is not None:
                self._changes.take(chosen, self.nodes if self._has_begun else None)
                self.nodes = chosen
                return
            session.loop.pump(TURN_S)
            missing = limits.missing(self._seen().ready)
            names = listed(missing)
            if missing and not announced:
                announced = True
                session.record(WaitingForNodes(nodes=missing))
                session.display.message(f"waiting for node {names} at port {launch.peer_address[1]}")
            if not enough and missing and now > began + patience_s:
                raise _missing(names, limits, patience_s)

    def _seen(self) -> Seen:
        present = self._leader.present if self._leader is not None else set()
        coming = present - self._ready - self._changes.leaving.keys()
        members = self.nodes if self._has_begun else frozenset()
        ready = frozenset(self._ready - self._changes.leaving.keys() | {self._own})
        return Seen(ready, frozenset(coming), members, self._own, self._expected)

    def _seen_now(self) -> Seen:
        return self._seen() if self._running else replace(self._seen(), members=frozenset())

    # -- while an attempt runs ---------------------------------------------------------------------------------------

    def begin(self, spec: AttemptSpec) -> None:
        """Begin an attempt on the other nodes."""
        self._ended.clear()
        self._busy.clear()
        self._running = self._has_begun = True
        self._changes.begin()
        for number in sorted(self.others):
            self._send(messages.Begin(spec=spec), number)

    def check(self) -> None:
        """Exchange signs of life, and forget nodes that are lost."""
        if self._leader is not None:
            self._leader.check()
            self._ready &= self._leader.present
            for number in self._changes.leaving.keys() - self._leader.present:
                del self._changes.leaving[number]

    def turn(self, node: Node) -> None:
        """End the attempt on this node if another node was lost or failed, and keep watchdogs informed."""
        self.check()
        lost = self.others - self._ready - self._ended.keys()
        if lost:
            node.end_attempt(_lost(*sorted(lost)))
        failed = next((failure for failure in self._ended.values() if not failure.kind.is_orderly), None)
        if failed is not None:
            cause = f"ended with another node's ranks: {failed.cause}"
            node.end_attempt(Failure(FailureKind.ENDED, cause), stacks=failed.kind is FailureKind.HUNG)
        if self._leader is not None:
            node.others_busy = any(self._busy.values())
            busy = node.others_busy or node.busy
            if busy != self._busy_sent:
                self._busy_sent = busy
                self._send(messages.Busy(busy=busy))
            self._changes.watch(node, self.limits, self._seen())

    def announce_stop(self, reason: str) -> None:
        """Pass a stop request on to the other nodes, unless they can continue without this one."""
        if self._welcome.epoch and self._changes.on_own_stop(self.limits, self._seen_now()):
            return
        self._send(messages.StopRun(reason=reason[: messages.MAX_REASON]))

    def join(self, own: Failure) -> Failure:
        """Wait until an attempt that ended here is over on all nodes; return the cause among the failures of all."""
        if self._leader is not None:
            self._wait_for_ends(self._leader, own)
        self._running = False
        everywhere = {number: _lost(number) for number in self.others} | {self._own: own, **self._ended}
        bad = {number: failure for number, failure in everywhere.items() if failure.kind is FailureKind.BAD_NODE}
        self.bad_nodes = set(bad)
        self._exclusion.exclude(bad | self._changes.evicted)
        self._changes.on_bad(bad, self.limits, self._seen(), can_hand_over=self._welcome.epoch > 0)
        combined = combine([everywhere[number] for number in sorted(everywhere)])
        return self._changes.revise(combined, self.nodes)

    def _wait_for_ends(self, leader: Leader, own: Failure) -> None:
        """Wait until every node that is connected has reported how the attempt ended there, but not for long."""
        session, attempt, end_sent = self._session, self._session.attempt, False
        # Nodes that ended well may still publish, or save.
        patience_s = _PEER_END_S + (self._config.restart.grace_s if own.kind.is_orderly else 0.0)
        deadline = session.monotonic() + patience_s
        while True:
            failures = [own, *self._ended.values()]
            if not end_sent and any(not failure.kind.is_orderly for failure in failures):
                end_sent = True
                hung = any(failure.kind is FailureKind.HUNG for failure in failures)
                self._send(messages.End(attempt=attempt, stacks=hung))
                deadline = min(deadline, session.monotonic() + _PEER_END_S)
            left = self.others & leader.present - self._ended.keys()
            if not left or session.monotonic() > deadline:
                break
            session.loop.pump(_JOIN_TURN_S)
            self.check()
        if left and not end_sent:
            self._send(messages.End(attempt=attempt, stacks=False))

    # -- the end -----------------------------------------------------------------------------------------------------

    def dismiss(self, decision: Stop | None) -> None:
        """Inform the other nodes how the run has ended (None: that is unknown), and disconnect."""
        if self._leader is None:
            return
        if decision is not None and not (self._changes.hands_over and decision.exit_code in _LEAVES):
            for number in sorted(self._leader.present):
                end = end_of_node(decision, number, self.bad_nodes)
                self._send(
                    messages.Finish(exit_code=end.exit_code.value, reason=end.reason[: messages.MAX_REASON]), number
                )
        self._leader.close()
        self._leader = None

    # -- messages ----------------------------------------------------------------------------------------------------

    def _send(self, message: messages.PeerMessage, number: int | None = None) -> None:
        if self._leader is not None:
            self._leader.send(message, number)

    def _on_message(self, number: int, message: messages.ToLeader) -> None:
        session = self._session
        match message:
            case messages.Hello(machine=machine):
                self._exclusion.meet(number, machine)
                self._ready.discard(number)
                self._changes.leaving.pop(number, None)
                joins = self._running and number not in self.nodes
                if self._running and number in self.nodes:
                    # Its runner is a new one, or was cut off: its part of this attempt is over.
                    lost = Failure(FailureKind.NODE_LOST, f"node {number} was lost and has come back")
                    self._ended.setdefault(number, lost)
                self._send(self._welcome.model_copy(update={"running": joins}), number)
            case messages.Ready(nproc=nproc) if nproc != self.limits.local_ranks:
                ours = self.limits.local_ranks
                reason = f"this node has {nproc} ranks, the leader {ours}; use the same --nproc-per-node everywhere"
                self._send(messages.Finish(exit_code=ExitCode.USAGE.value, reason=reason), number)
            case messages.Ready(has_state=has_state):
                self._ready.add(number)
                (self._with_state.add if has_state else self._with_state.discard)(number)
            case messages.Busy(busy=busy):
                self._busy[number] = busy
            case messages.StopRun(reason=reason):
                self._changes.on_stop(number, reason, self.limits, self._seen_now())
            case messages.Forwarded(attempt=session.attempt, event=event):
                self._on_event(event)
            case messages.Ended(attempt=session.attempt, failure=failure):
                self._ended[number] = failure
                self._ready.discard(number)
            case _:
                pass


def _lost(*numbers: int) -> Failure:
    return Failure(FailureKind.NODE_LOST, f"node {listed(numbers)} is gone, or silent for too long")


def _missing(names: str, limits: Limits, waited_s: float) -> PeersMissing:
    needed = f"; {limits.min_nodes} nodes are enough" if limits.is_elastic else ""
    return PeersMissing(
        f"node {names} of {limits.max_nodes} has not connected within {waited_s:.0f} s "
        f"(launch.rendezvous_timeout_s){needed}; start the same command there with its --node-rank"
    )
