"""Who leads when a node starts: the first node, or in an elastic run the one that has the lease."""

from __future__ import annotations

from checkpointing.errors import CheckpointError
from runner.config.schema import Config
from runner.journal.run_directory import RunDirectory
from runner.lease.lease import Lease, LeaseClaim, LeaseWatch
from runner.lease.record import LeaseRecord, newest_lease
from runner.session.session import Session


class LeaderChoice:
    """The role of one node.

    Attributes:
        leads: Whether it leads.
        caveat: What the user should know; None for nothing.
    """

    def __init__(self, config: Config, directory: RunDirectory, *, forced: bool) -> None:
        """Ask storage who leads; nothing is written.

        Args:
            config: The resolved configuration.
            directory: The run's folder.
            forced: Whether the first node leads in any case, as it was not asked to continue.
        """
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

        Returns:
            Renews the lease; None where the leader cannot change.

        Raises:
            OSError: Storage refused, or did not answer.
        """
        if not self._may_change or not self.leads:
            return None
        newest, host = self._newest, self._config.launch.peer_address[0]
        run_id = self._directory.run_id()
        if newest is not None and newest.holder == run_id:
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
