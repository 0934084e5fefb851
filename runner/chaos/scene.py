"""What a fault sees of a training, and when it may strike."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import psutil

from checkpointing.failpoints import FILE_ENV, ONCE_ENV
from checkpointing.tiers import Tiers
from runner.chaos.clock import Clock
from runner.chaos.faulty_proxy import BadLine, endpoint_of_environment
from runner.chaos.memory_group import MemoryGroup
from runner.chaos.run_under_test import Subject


class Effect(Enum):
    """What a fault is expected to end."""

    ATTEMPT = "attempt"  # the supervisor starts the next one
    RUN = "run"  # the supervisor itself: whoever runs it starts it again
    NOTHING = "nothing"  # training goes on


class Moment(Enum):
    """When it strikes."""

    START_UP = "start-up"
    RESTORE = "restore"
    STEP = "step"
    SAVE = "save"


ANY_MOMENT = tuple(Moment)
TRAINING = (Moment.STEP, Moment.SAVE)


class NotNow(Exception):
    """Nothing to do it to at this moment; the text says why."""


class FailpointFile:
    """Arms failpoints in processes that run; see `checkpointing.failpoints`."""

    def __init__(self, path: Path) -> None:
        self._path, self._fired = path, path.with_suffix(".fired")
        self._fired.mkdir(parents=True)
        self.arm("")

    @property
    def environment(self) -> dict[str, str]:
        """What makes a training listen."""
        return {FILE_ENV: str(self._path), ONCE_ENV: str(self._fired)}

    def arm(self, text: str) -> None:
        """These, and no others."""
        new = self._path.with_suffix(".new")
        new.write_text(text)
        status = new.stat()
        self._version = f"{status.st_ino}.{status.st_mtime_ns}"
        new.rename(self._path)

    def has_fired(self, name: str) -> bool:
        return (self._fired / f"{name}.{self._version}").exists()


@dataclass
class Scene:
    """What a fault may touch.

    Attributes:
        line: between the training and its S3 server; None: there is no such server, or none that can be spoiled.
        clock, memory: the training's own; or why it has none.
        damaged: steps of checkpoints that this strike has damaged.
    """

    subject: Subject
    tiers: Tiers
    random: random.Random
    failpoints: FailpointFile
    line: BadLine | None = None
    clock: Clock | str = "no clock of its own"
    memory: MemoryGroup | str = "no memory cgroup of its own"
    damaged: set[int] = field(default_factory=set)

    def ranks(self) -> list[psutil.Process]:
        """Living ranks of the newest attempt."""
        started = self.subject.all("rank_started")
        newest = max((event["attempt"] for event in started), default=0)
        numbers = sorted({event["rank"] for event in started if event["attempt"] == newest})
        return [process for number in numbers if (process := self.subject.rank(number)) is not None]


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        strike: does it; returns what it has done, in words. Raises NotNow.
        restarts: attempts that it ends, at a moment of training.
        halves: the micro-batch, so that the same sums are made in another order from then on.
        spoils_network: between the run and its object store.
        damages: a checkpoint on a local disk.
    """

    name: str
    effect: Effect
    strike: Callable[[Scene], str]
    moments: tuple[Moment, ...] = ANY_MOMENT
    restarts: int = 1
    halves: bool = False
    spoils_network: bool = False
    damages: bool = False

    def fits(self, tiers: Tiers) -> bool:
        """Whether checkpoints lie where it could strike."""
        if "local." in self.name or self.name.startswith(("disk", "I/O")):
            return any(storage.root is not None for storage in tiers.nearest_first)
        if "remote." in self.name or self.name.startswith("upload"):
            return tiers.durable.root is None
        if self.spoils_network:
            return tiers.durable.root is None and endpoint_of_environment() is not None
        if self.damages:
            return tiers.durable.root is not None and tiers.local is None
        return True
