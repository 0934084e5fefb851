"""What a rank uses of its node's agent: the connection, and what is made with it."""

from __future__ import annotations

import contextlib
import functools
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import torch

from checkpointing.agent.client import AgentClient, AgentProcess
from checkpointing.agent.events import Pinned
from checkpointing.agent.options import AgentOptions
from checkpointing.commit.catalog import Catalog
from checkpointing.commit.retention import Retention
from checkpointing.commit.tiers import STAGES
from checkpointing.errors import CheckpointError
from checkpointing.host.environment import LOCATION_ENV
from checkpointing.host.heartbeat import Phase
from checkpointing.host.shared_memory import SharedMemory
from checkpointing.manager.options import Options
from checkpointing.manager.reporter import HeartbeatWriter, Reporter
from checkpointing.process import device
from checkpointing.process.pinning import Pinning
from checkpointing.process.ranks import Ranks
from checkpointing.resume.restorer import Restorer
from checkpointing.snapshot.schedule import SnapshotSchedule
from checkpointing.storage import LocalStorage

Connect = Callable[[Options, Ranks], "AgentConnection"]


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


class AgentConnection:
    """Connects on construction; every rank must construct it at the same time.

    Args:
        options: The manager's options.
        ranks: This rank, with a group that the training thread uses.
        start_agent: Starts an agent; see `AgentProcess.start`.
        connect: Connects to an agent; see `AgentClient`.

    Attributes:
        stage: Which of the run's trainings this is.
        tiers: Where this stage keeps its checkpoints.
        client: The connection.
        pinning: Pins the arenas' memory; None where the driver cannot.

    Raises:
        AgentUnavailable: The agent cannot be reached.
        CheckpointError: The agent could not be started.
    """

    def __init__(
        self,
        options: Options,
        ranks: Ranks,
        *,
        start_agent: Callable[..., AgentProcess] = AgentProcess.start,
        connect: Callable[..., AgentClient] = AgentClient,
    ) -> None:
        self._options, self._ranks, self._start_agent = options, ranks, start_agent
        self._own_agent: AgentProcess | None = None
        self.stage = STAGES.enter(options.own_location, supervised=options.has_chosen_location)
        self.tiers = options.tiers.inside(self.stage)
        self.pinning: Pinning | None = None
        if device.can_pin():
            self.pinning = Pinning(
                device.register, device.unregister, self._report_pinned, torch.accelerator.set_device_index
            )
        # A node's only rank copies all of an arena; of several, the first snapshot shows which part is whose.
        alone = self.pinning if ranks.local_world_size == 1 else None
        socket_path, attempt = options.settings.agent_socket, options.settings.attempt
        if not socket_path:
            socket_path, attempt = self._start_own_agent()
        self.client = connect(
            socket_path,
            attempt,
            ranks.rank,
            ranks.local_rank,
            ranks.local_world_size,
            fetch=options.resume == "auto",
            stage=self.stage,
            on_read=alone.pin if alone is not None else _nothing,
            on_reserved=alone.want_all if alone is not None else _nothing,
            on_detach=self.pinning.release if self.pinning is not None else _nothing,
        )
        # Once per run, not at each restart.
        if ranks.is_first and options.has_chosen_location and options.settings.attempt == 1:
            notice = location_notice(self.tiers.durable.location, options.own_location)
            if notice is not None:
                print(f"checkpointing: {notice}", file=sys.stderr, flush=True)

    def leave(self, step: int, *, finished: bool) -> None:
        """Disconnect after `step`; if the training has `finished`, the next one at this location is a new stage."""
        self.client.close()
        STAGES.leave(self._options.own_location, step, finished=finished)

    def close_own_agent(self) -> None:
        """Let the agent that this rank has started finish its commits, and end it."""
        if self._own_agent is not None:
            self._own_agent.close()

    def _start_own_agent(self) -> tuple[str, int]:
        """Have local rank 0 start the node's agent; return its socket and the attempt on every rank of the node."""
        mine: tuple[str, int] | str | None = None
        if self._ranks.local_rank == 0:
            try:
                mine = self._start()
            except (CheckpointError, OSError) as error:
                mine = str(error)
        leader = self._ranks.gather(mine)[self._ranks.rank - self._ranks.local_rank]
        assert leader is not None
        if isinstance(leader, str):
            raise CheckpointError(leader)
        return leader

    def _start(self) -> tuple[str, int]:
        catalog = self.tiers.catalog
        manifest = next((entry.manifest for entry in catalog.scan() if entry.manifest), None)
        run_id = manifest.run_id if manifest is not None else uuid.uuid4().hex
        attempt = catalog.newest_attempt() + 1
        self._own_agent = self._start_agent(
            AgentOptions(
                location=self.tiers.durable.location,
                run_id=run_id,
                local_tier=self.tiers.local.location if self.tiers.local is not None else None,
                local_retention=Retention(keep_last=self._options.local_keep_last),
                commits=self._ranks.is_first,
                memory_limit=self._options.memory_limit,
            )
        )
        return self._own_agent.socket_path, attempt

    def _report_pinned(self, nbytes: int, seconds: float, complete: bool) -> None:
        if self._ranks.is_first:
            event = Pinned(nbytes=nbytes, seconds=round(seconds, 3), complete=complete)
            # The training thread notices by itself that the agent is gone.
            with contextlib.suppress(CheckpointError):
                self.client.announce(event)


def _nothing(arena: SharedMemory) -> None:
    """Leave an arena as it is."""


def location_notice(kept: str, own: str) -> str | None:
    """Return the notice, or None where the script's own location is used.

    Args:
        kept: Location that the supervisor, or the user's environment, chose.
        own: Location that the script chose; empty for none.
    """
    if not own or Path(own).absolute() == Path(kept).absolute():
        return None
    text = (
        f"checkpoints are kept at {kept}, not at {own}, as this runs under a supervisor; "
        f"with {LOCATION_ENV}={kept} plain torchrun or python resumes from them, too"
    )
    if Path(own).is_dir() and (steps := Catalog(LocalStorage(Path(own))).committed_steps()):
        text += (
            f". {own} holds checkpoints up to step {steps[-1]}, from which this run does not resume; "
            f"for that, runner start --set checkpoint.location={own}"
        )
    return text
