"""The lease as a supervisor and a follower use it: one has it, the other may come to have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from runner.errors import ExitCode, LeaderReplaced
from runner.journal.attempts import AttemptSpec
from runner.journal.events import LeaderChanged
from runner.lease.lease import Lease, LeaseWatch, own_address
from runner.lease.record import LeaseRecord
from runner.node.node import Node
from runner.peers.link import Member
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.session.session import Session

_TURN_S = 0.5
# For a look at the lease, and the last word on it; where storage does not answer, the others find it stale.
_ANSWER_S = 5.0
# Attempts of a leader that another one has begun after it. The other finds out within two seconds that it was replaced;
# more of them are a second run of this job, which is not resolved by waiting.
_MOST_OUTPACED = 5


@dataclass(frozen=True)
class Inherited:
    """What a node that has followed until now leads with.

    Attributes:
        node: The node; None if it never met a leader.
        companions: Node ranks of the nodes that followed the same leader, and are likely to follow this one.
    """

    node: Node | None = None
    companions: frozenset[int] = frozenset()


class Leadership:
    """The right of a node to lead its run.

    Attributes:
        run_id: Identity of the run on its nodes.
        epoch: In which it leads; 0 where only the first node can lead, and needs no lease.
        host: Where the nodes meet; empty for the first node, which all are configured with.
    """

    def __init__(self, session: Session, keeper: Lease | None) -> None:
        """Prepare; `begin` renews the lease from then on.

        Args:
            session: Of this node.
            keeper: Has the lease; None where only the first node can lead.
        """
        self._session, self._keeper = session, keeper
        self.run_id, self.epoch, self.host = session.run_id, 0, ""
        self._outpaced = 0
        if keeper is not None:
            self.run_id, self.epoch = keeper.lease.run_id, keeper.lease.epoch
            self.host = keeper.lease.host if session.config.launch.node_rank else ""

    def begin(self, *, took_over: bool) -> None:
        """Renew the lease in the session's loop.

        Args:
            took_over: Whether this node has followed another leader until now, which is recorded.
        """
        if self._keeper is None:
            return
        keeper, session = self._keeper, self._session
        session.loop.every(_TURN_S, lambda: keeper.turn(session.monotonic()))
        if took_over:
            lease = keeper.lease
            session.record(LeaderChanged(epoch=lease.epoch, node=lease.node_rank, host=lease.host))

    @property
    def is_lost(self) -> bool:
        """Whether another node leads now, as far as this one knows."""
        return self._keeper is not None and self._keeper.replaced_by is not None

    def check(self) -> None:
        """Check that this node still leads, as far as it knows.

        Raises:
            LeaderReplaced: Another node leads.
        """
        newer = self._keeper.replaced_by if self._keeper is not None else None
        if newer is not None:
            raise LeaderReplaced(
                f"node {newer.node_rank} leads this run now (lease {newer.epoch}): this node was silent for too long"
            )

    def judge(self, failure: Failure) -> Failure:
        """Return how an attempt has ended; if it was fenced, storage is asked who leads, for the next `check`.

        If this node does, a leader that was only slow has begun an attempt of this number, and the next one is free.

        Args:
            failure: How the attempt seems to have ended.
        """
        if self._keeper is None or failure.kind is not FailureKind.FENCED or self._keeper.look(_ANSWER_S) is not None:
            return failure
        self._outpaced += 1
        if self._outpaced > _MOST_OUTPACED:
            return failure
        cause = "the leader before this one was only slow, and has begun this attempt, too"
        return replace(failure, kind=FailureKind.OUTPACED, cause=cause)

    def release(self) -> None:
        """Record that this node does not lead any more."""
        if self._keeper is not None:
            self._keeper.release(_ANSWER_S)


class Takeover:
    """Whether a follower leads in place of a leader that is gone.

    Attributes:
        lease: The lease that it has taken; None as long as it follows.
    """

    def __init__(
        self, session: Session, watch: LeaseWatch | None, lead: Callable[[LeaseRecord, Inherited], ExitCode] | None
    ) -> None:
        """Prepare.

        Args:
            session: Of this node.
            watch: Looks who leads while there is no leader; None where only the first node can.
            lead: Leads to the end of the run.
        """
        self._session, self._watch, self._lead = session, watch, lead
        self.lease: LeaseRecord | None = None
        self._companions: frozenset[int] = frozenset()

    def follow(self, epoch: int) -> None:
        """Take in that there is a leader.

        Args:
            epoch: In which it leads; 0 if it has no lease.
        """
        if self._watch is not None:
            self._watch.followed(epoch)

    def attempt(self, spec: AttemptSpec) -> None:
        """Take in which nodes follow the leader."""
        self._companions = frozenset(spec.nodes) - {spec.leader}

    def look(self, member: Member, node: Node | None) -> None:
        """Connect to the node that has the lease, or take it; called about twice per second without a leader.

        Args:
            member: The connection, which is lost.
            node: This node; None if it never met a leader.
        """
        if self._watch is None or self._session.stop or self.lease is not None:
            return
        known, towards = self._session.config.launch.local_addr or member.own_host, member.address[0]
        # The others keep what they hold in memory only for the run that they know.
        known_run = node or self._watch.newest
        self.lease = self._watch.turn(
            self._session.monotonic(),
            has_state=node is not None and node.has_state,
            host=lambda: known or own_address(towards),
            run_id=(known_run.run_id if known_run is not None else "") or self._session.run_id,
        )
        newest = self._watch.newest
        if newest is not None and newest.host and not newest.released:
            member.follow((newest.host, member.address[1]))

    def lead(self, node: Node | None) -> ExitCode | None:
        """Leadership to the end of the run, if this node has the lease; returns the exit code of the process."""
        if self.lease is None or self._lead is None:
            return None
        return self._lead(self.lease, Inherited(node, self._companions))
