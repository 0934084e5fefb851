"""What a fault is, what it may touch, and when it may be injected."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import psutil

from checkpointing.commit.tiers import Tiers, open_tiers
from checkpointing.host.failpoints import FILE_ENV, ONCE_ENV
from runner.chaos.run_under_test import RunUnderTest
from runner.chaos.sandbox import Clock, FaultyProxy, MemoryGroup, endpoint_of_environment, made_or_why_not
from runner.config.schema import Config
from runner.errors import ExitCode, RunnerError
from runner.journal.events import RankStarted


class CampaignFailed(RunnerError):
    """The campaign cannot start: the job fails without faults, or no fault applies to it."""

    exit_code = ExitCode.USAGE


class NotApplicable(Exception):
    """The fault cannot be injected at this moment; the text says why."""


class Effect(Enum):
    """What a fault is expected to end."""

    ATTEMPT = "attempt"  # The supervisor starts the next one.
    RUN = "run"  # The supervisor exits, and its scheduler starts it again.
    NOTHING = "nothing"  # Training continues.


class Moment(Enum):
    """When a fault is injected."""

    START_UP = "start-up"
    RESTORE = "restore"
    STEP = "step"
    SAVE = "save"


ANY_MOMENT = tuple(Moment)
TRAINING = (Moment.STEP, Moment.SAVE)


@dataclass(frozen=True)
class JobPace:
    """Number of steps of a job, and seconds per step of its fault-free run."""

    steps: int
    step_s: float


class Locations:
    """Where a campaign's runs keep their checkpoints: on the job's own storage, apart from those of the job."""

    def __init__(self, config: Config, campaign: str) -> None:
        """Prepare those of the campaign of this name."""
        self._location, self._tier = config.checkpoint.location, config.checkpoint.local_tier
        self._campaign = f"chaos-{campaign}"

    def location(self, folder: Path) -> str:
        """Return the durable location of the run in `folder`."""
        if self._location is None:
            return str(folder / "checkpoints")
        return f"{self._location.rstrip('/')}/{self._campaign}/{folder.name}"

    def local_tier(self, folder: Path) -> str | None:
        """Return the local tier of the run in `folder`, if the job has one."""
        return f"{self._tier}/{self._campaign}/{folder.name}" if self._tier is not None else None

    def tiers(self, folder: Path) -> Tiers:
        """Open the storage of the run in `folder`."""
        return open_tiers(self.location(folder), self.local_tier(folder))

    def settings(self, folder: Path) -> list[str]:
        """Return the options of `runner start` for the run in `folder`."""
        tier = self.local_tier(folder)
        settings = [f"checkpoint.location={self.location(folder)}"]
        settings += [f"checkpoint.local_tier={tier}"] if tier is not None else []
        return [part for setting in settings for part in ("--set", setting)]

    def remove(self, folder: Path) -> None:
        """Remove a run's folder and its checkpoints."""
        for storage in self.tiers(folder).nearest_first:
            storage.remove_all()
        shutil.rmtree(folder, ignore_errors=True)


class FailpointFile:
    """A file that arms failpoints in running processes; see `checkpointing.host.failpoints`."""

    def __init__(self, path: Path) -> None:
        """Create the file with no failpoint armed, and a folder (suffix .fired) for what has fired."""
        self._path, self._fired = path, path.with_suffix(".fired")
        self._fired.mkdir(parents=True)
        self.arm("")

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that make a run read the file."""
        return {FILE_ENV: str(self._path), ONCE_ENV: str(self._fired)}

    def arm(self, text: str) -> None:
        """Arm these failpoints and disarm all others."""
        new = self._path.with_suffix(".new")
        new.write_text(text)
        status = new.stat()
        self._version = f"{status.st_ino}.{status.st_mtime_ns}"
        new.rename(self._path)

    def has_fired(self, name: str) -> bool:
        """Return whether a failpoint has fired since it was armed last."""
        return (self._fired / f"{name}.{self._version}").exists()


@dataclass
class Scene:
    """What a fault may touch."""

    run: RunUnderTest
    tiers: Tiers
    random: random.Random  # Source of all choices.
    failpoints: FailpointFile
    proxy: FaultyProxy | None = None  # Between the run and its S3 server; None without a server that speaks plain HTTP.
    clock: Clock | str = "the run has no clock of its own"  # The run's own wall clock, or why it has none.
    # The run's own memory cgroup, or why it has none.
    memory: MemoryGroup | str = "the run has no memory cgroup of its own"
    damaged: set[int] = field(default_factory=set)  # Steps of the checkpoints that the current fault damaged.

    def ranks(self) -> list[psutil.Process]:
        """Return the running ranks of the newest attempt."""
        started = [(entry.attempt, entry.event) for entry in self.run.entries if isinstance(entry.event, RankStarted)]
        newest = max((attempt for attempt, _ in started), default=0)
        numbers = sorted({event.rank for attempt, event in started if attempt == newest})
        return [process for number in numbers if (process := self.run.rank(number)) is not None]


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str  # As `runner chaos --fault` takes it.
    effect: Effect  # What it is expected to end.
    inject: Callable[[Scene], str]  # Injects it and returns what it did, in words. Raises NotApplicable.
    moments: tuple[Moment, ...] = ANY_MOMENT  # When it may be injected.
    restarts: int = 1  # Number of attempts that it ends when it is injected during training.
    halves: bool = False  # Whether it halves the micro-batch, so that sums are added in another order from then on.
    disturbs_network: bool = False  # Whether it needs the proxy between the run and its object store.
    damages: bool = False  # Whether it damages a checkpoint on a local disk.

    def fits(self, tiers: Tiers) -> bool:
        """Return whether the fault applies to this storage."""
        if "local." in self.name or self.name.startswith(("disk", "I/O")):
            return any(storage.root is not None for storage in tiers.nearest_first)
        if "remote." in self.name or self.name.startswith("upload"):
            return tiers.durable.root is None
        if self.disturbs_network:
            return tiers.durable.root is None and endpoint_of_environment() is not None
        if self.damages:
            return tiers.durable.root is not None and tiers.local is None
        return True


StartRun = Callable[[Path, dict[str, str], Callable[[int], None]], RunUnderTest]
"""Makes the run of a folder, with additional environment variables and a callback for the runner's process id."""


@contextlib.contextmanager
def prepare_scene(folder: Path, locations: Locations, random: random.Random, make_run: StartRun) -> Iterator[Scene]:
    """Set up everything that faults need around a run in a new folder; it is not started yet."""
    folder.mkdir(parents=True)
    failpoints = FailpointFile(folder / "failpoints")
    environment = failpoints.environment
    upstream = endpoint_of_environment()
    with contextlib.ExitStack() as stack:
        proxy = None
        if upstream is not None and "://" in locations.location(folder):
            proxy = stack.enter_context(FaultyProxy(upstream))
            environment |= {"AWS_ENDPOINT_URL": proxy.endpoint, "AWS_ENDPOINT_URL_S3": proxy.endpoint}
        clock, memory = made_or_why_not(lambda: Clock(folder / "clock")), made_or_why_not(MemoryGroup)
        if isinstance(clock, Clock):
            environment |= clock.environment
        if isinstance(memory, MemoryGroup):
            stack.callback(memory.close)
        on_start = memory.enter if isinstance(memory, MemoryGroup) else lambda pid: None
        tiers = locations.tiers(folder)
        yield Scene(make_run(folder, environment, on_start), tiers, random, failpoints, proxy, clock, memory)
