"""Which node leads: the choice when a node starts, the lease of the one that leads, and the takeover by another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from checkpointing.errors import CheckpointError
from runner.config.schema import Config
from runner.errors import ExitCode, LeaderReplaced
from runner.journal.attempts import AttemptSpec
from runner.journal.events import LeaderChanged
from runner.journal.run_directory import RunDirectory
from runner.lease.lease import Lease, LeaseClaim, LeaseRecord, LeaseWatch, newest_lease, own_address
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


class LeaderChoice:
    """The role of one node.

    Attributes:
        leads: Whether it leads.
        caveat: What the user should know; None for nothing.
    """

    def __init__(self, config: Config, directory: RunDirectory, *, forced: bool) -> None:
        """Ask storage who leads, and write nothing; if `forced`, the first node does: it was not asked to continue."""
        self._config, self._directory = config, directory
        launch = config.launch
        self.leads = launch.node_rank == 0
        self.caveat: str | None = None
        self._newest: LeaseRecord | None = None
        self._may_change = launch.min_nodes is not None and launch.min_nodes < launch.nnodes
        if not self._may_change:
            return
        sidecars = config.tiers.durable.sidecars
        try:
            self._newest = newest_lease(sidecars)
            self._may_change = sidecars.decides
        except (CheckpointError, OSError):
            # Without storage nobody can take the lead, and the first node begins; the others look again.
            self._may_change = not self.leads
            return
        if not self._may_change:
            self.caveat = (
                f"{config.checkpoint_location}: this storage does not decide between two writers, so that no other "
                "node can lead: if the first one is lost for good, the run waits for it"
            )
        elif not (forced and self.leads):
            self.leads = self._claim.leads_at_start(self._newest)

    @property
    def _claim(self) -> LeaseClaim:
        return LeaseClaim(self._config.tiers.durable.sidecars, self._directory.run_id(), self._config.launch.node_rank)

    def take(self) -> Lease | None:
        """Take the lease of a node that leads; `leads` is False if another one was first.

        Returns None then, and where the leader cannot change. Raises OSError if storage refused, or did not answer.
        """
        if not self._may_change or not self.leads:
            return None
        newest, host = self._newest, self._config.launch.peer_address[0]
        run_id = self._directory.run_id()
        if newest is not None and self._claim.holds(newest):
            # It was killed, and is back: the others know the run, and it, by these.
            run_id, host = newest.run_id or run_id, newest.host or host
        lease = self._claim.take_after(newest, host, run_id)
        self.leads = lease is not None
        return Lease(self._config.tiers.durable.sidecars, lease) if lease is not None else None

    def watch(self) -> LeaseWatch | None:
        """Return what a node that follows looks at while there is no leader; None where the leader cannot change."""
        return LeaseWatch(self._claim) if self._may_change else None


def take_over(session: Session, lease: LeaseRecord) -> Lease:
    """Begin to lead in a session that has followed."""
    session.display.show()
    session.display.message(f"the leader is gone: node {lease.node_rank} leads this run now, at {lease.host}")
    return Lease(session.config.tiers.durable.sidecars, lease)


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

    Without a lease (`keeper`) only the first node can lead.

    Attributes:
        run_id: Identity of the run on its nodes.
        epoch: In which it leads; 0 without a lease.
        host: Where the nodes meet; empty for the first node, which all are configured with.
    """

    def __init__(self, session: Session, keeper: Lease | None) -> None:
        self._session, self._keeper = session, keeper
        self.run_id, self.epoch, self.host = session.run_id, 0, ""
        self._outpaced = 0
        if keeper is not None:
            self.run_id, self.epoch = keeper.lease.run_id, keeper.lease.epoch
            self.host = keeper.lease.host if session.config.launch.node_rank else ""

    def begin(self, *, took_over: bool) -> None:
        """Renew the lease in the loop of the session; record it if this node has followed another leader until now."""
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
        """Raise LeaderReplaced if another node leads, as far as this one knows."""
        newer = self._keeper.replaced_by if self._keeper is not None else None
        if newer is not None:
            raise LeaderReplaced(
                f"node {newer.node_rank} leads this run now (lease {newer.epoch}): this node was silent for too long"
            )

    def judge(self, failure: Failure) -> Failure:
        """Return how an attempt has ended; if it was fenced, storage is asked who leads, for the next `check`.

        If this node does, a leader that was only slow has begun an attempt of this number, and the next one is free.
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
    """Whether a follower leads in place of a leader that is gone. Without a watch only the first node can.

    Attributes:
        lease: The lease that it has taken; None as long as it follows.
    """

    def __init__(
        self, session: Session, watch: LeaseWatch | None, lead: Callable[[LeaseRecord, Inherited], ExitCode] | None
    ) -> None:
        self._session, self._watch, self._lead = session, watch, lead
        self.lease: LeaseRecord | None = None
        self._companions: frozenset[int] = frozenset()

    def follow(self, epoch: int) -> None:
        """Note that there is a leader; `epoch` is 0 if it has no lease."""
        if self._watch is not None:
            self._watch.followed(epoch)

    def attempt(self, spec: AttemptSpec) -> None:
        """Note which nodes follow the leader."""
        self._companions = frozenset(spec.nodes) - {spec.leader}

    def look(self, member: Member, node: Node | None) -> None:
        """Connect to the node that has the lease, or take it; called about twice per second without a leader."""
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
