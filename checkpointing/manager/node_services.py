"""What a rank uses of its node's agent: the connection, and what is made with it."""

from __future__ import annotations

import functools
from collections.abc import Callable

from checkpointing.host.heartbeat import Phase
from checkpointing.manager.agent_connection import AgentConnection
from checkpointing.manager.heartbeat_writer import HeartbeatWriter
from checkpointing.manager.options import Options
from checkpointing.manager.reporter import Reporter
from checkpointing.process.ranks import Ranks
from checkpointing.resume.restorer import Restorer
from checkpointing.snapshot.schedule import SnapshotSchedule

Connect = Callable[[Options, Ranks], AgentConnection]


class NodeServices:
    """The agent is reached, or started, when one of these is first used: a script may make several managers before.

    Args:
        options: The manager's options.
        ranks: This rank, with a group that the training thread uses.
        connect: Reaches, or starts, the node's agent; see `AgentConnection`.

    Attributes:
        connection: The connection to the agent, with the stage of the run and the tiers of its checkpoints.
        heartbeat: Writes this rank's signs of life.
        reporter: Reports to a supervisor.
        restorer: Finds and reads what to resume from.
        snapshots: Takes snapshots.
    """

    def __init__(self, options: Options, ranks: Ranks, connect: Connect) -> None:
        self._options, self._ranks, self._connect = options, ranks, connect
        self._copy_thread_ranks = ranks.with_new_group()

    @functools.cached_property
    def connection(self) -> AgentConnection:  # noqa: D102
        return self._connect(self._options, self._ranks)

    @property
    def is_connected(self) -> bool:
        """Whether the agent was reached."""
        return "connection" in vars(self)

    @functools.cached_property
    def heartbeat(self) -> HeartbeatWriter:  # noqa: D102
        return HeartbeatWriter(self.connection.client.control, self._ranks.local_rank)

    @functools.cached_property
    def reporter(self) -> Reporter:  # noqa: D102
        return Reporter(self.connection.client, is_first=self._ranks.is_first)

    @functools.cached_property
    def restorer(self) -> Restorer:  # noqa: D102
        connection, options = self.connection, self._options
        supervised = bool(options.settings.agent_socket)
        return Restorer(connection.tiers, connection.client, self._ranks, options.resume, supervised=supervised)

    @functools.cached_property
    def snapshots(self) -> SnapshotSchedule:  # noqa: D102
        return SnapshotSchedule(
            self.connection.client,
            self.connection.tiers,
            self._copy_thread_ranks,
            overlap=self._options.overlap,
            check_replicas=self._options.check_replicas,
            check_finite=not self._options.allow_non_finite,
            pinning=self.connection.pinning,
            buddy_copies=self._options.buddy_copies,
            waiting=lambda: self.heartbeat.during(Phase.SAVING),
        )
