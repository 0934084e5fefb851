"""The connection of a single rank to an agent that keeps what is staged, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.small_checkpoint import Agent
from helpers.small_training import Arenas

from checkpointing.agent.client import OfferedSnapshot
from checkpointing.agent.events import Event
from checkpointing.commit.retention import Retention
from checkpointing.commit.tiers import FIRST_STAGE, TrainingStage
from checkpointing.format.step_record import RING_BYTES
from checkpointing.host.environment import RankSettings
from checkpointing.host.heartbeat import ControlPage, Heartbeat
from checkpointing.host.shared_memory import SharedMemory
from checkpointing.manager.manager import CheckpointManager
from checkpointing.manager.options import Options
from checkpointing.process.ranks import Ranks
from checkpointing.snapshot.cadence import Cadence


class Client(Arenas, Agent):
    """In place of `AgentClient`.

    Attributes:
        commits: Steps that were to be committed, in order.
        errors: By step, why its commit fails.
    """

    def __init__(self, directory: Path, *snapshots: OfferedSnapshot) -> None:
        Arenas.__init__(self)
        Agent.__init__(self, directory, *snapshots)
        self.control = ControlPage.create(1)
        self.step_ring = SharedMemory.create("step-record", RING_BYTES)
        self.commits: list[int] = []
        self.metrics: dict[int, dict[str, float]] = {}
        self.errors: dict[int, str] = {}

    def reserve(self, nbytes: int, guests: int = 0) -> bool:
        return False

    def staged(self, step: int, arena: int, files: list[tuple[str, int, int]], *args: Any, **kwargs: Any) -> None:
        super().staged(step, arena, files)
        self.metrics[step] = kwargs["metrics"]
        self.commits += [step] if kwargs["commit"] else []

    def announce(self, event: Event) -> None:
        Agent.announce(self, event)

    def wait(self, step: int) -> str | None:
        return self.errors.get(step)

    @property
    def beat(self) -> Heartbeat:
        return self.control.read(0)


class Connection:
    """In place of `AgentConnection`; call it to connect.

    Attributes:
        client: The connection's client.
        num_connected: How often it was connected.
        left: Step, and whether the training had finished, of each end.
    """

    def __init__(self, directory: Path, *snapshots: OfferedSnapshot, stage: TrainingStage = FIRST_STAGE) -> None:
        self.client = Client(directory, *snapshots)
        self.stage, self.pinning = stage, None
        self.num_connected = self.num_closed = 0
        self.left: list[tuple[int, bool]] = []

    def __call__(self, options: Options, ranks: Ranks) -> Any:
        self.tiers = options.tiers
        self.num_connected += 1
        return self

    def leave(self, step: int, *, finished: bool) -> None:
        self.left.append((step, finished))

    def close_own_agent(self) -> None:
        self.num_closed += 1


def manager(options: Options, connection: Connection) -> CheckpointManager:
    """A manager of a single rank, of what it is made of rather than of what a script gives."""
    made = CheckpointManager.__new__(CheckpointManager)
    made._assemble(options, Ranks(), connection)
    return made


def options(location: Path, settings: RankSettings | None = None, cadence: Cadence | None = None) -> Options:
    """The options of a manager that was given a location and nothing else."""
    return Options.resolve(
        settings or RankSettings(),
        location=location,
        local_tier=None,
        local_keep_last=2,
        resume=None,
        memory_limit=1 << 20,
        cadence=cadence or Cadence(),
        retention=Retention(),
        overlap=None,
        check_replicas=True,
        buddy_copies=True,
    )
