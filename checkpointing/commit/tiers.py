"""Where a run keeps its checkpoints: a durable place, and optionally a fast directory of this machine before it."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass

from checkpointing.commit.catalog import Catalog
from checkpointing.storage import Storage, open_storage

LOCAL, REMOTE = "local", "remote"
# A local tier is for speed; the durable one keeps checkpoints for long.
DEFAULT_LOCAL_KEEP_LAST = 2


@dataclass(frozen=True)
class Tiers:
    """Checkpoints are committed to the first tier, and copied to the durable one in the background.

    Attributes:
        durable: The place that survives this machine.
        local: The directory in front of it; None if there is none.
    """

    durable: Storage
    local: Storage | None = None

    @property
    def first(self) -> Storage:
        """The tier that snapshots are committed to."""
        return self.local or self.durable

    @property
    def nearest_first(self) -> tuple[Storage, ...]:
        """All tiers, the local one first."""
        return (self.durable,) if self.local is None else (self.local, self.durable)

    @property
    def catalog(self) -> Catalog:
        """The checkpoints of all tiers."""
        return Catalog(*self.nearest_first)

    def inside(self, stage: TrainingStage) -> Tiers:
        """Return the tiers of one of the run's stages."""
        local = stage.inside(self.local.location) if self.local is not None else None
        return open_tiers(stage.inside(self.durable.location), local)

    @property
    def stages(self) -> list[tuple[TrainingStage, Tiers]]:
        """The run's stages after its first one, in order, with their tiers.

        Raises:
            OSError: Storage refused.
        """
        found = []
        for name in self.durable.sidecars.sizes("stage-"):
            stage = TrainingStage.from_json(self.durable.sidecars.read(name))
            if stage is not None:
                found.append((stage, self.inside(stage)))
        return sorted(found, key=lambda item: item[0].number)

    def newest_committed(self) -> tuple[int, int]:
        """Find the newest committed step of the last stage that has any.

        Returns:
            The step within its stage, and counted over all stages; -1 each if there is none.

        Raises:
            OSError: Storage refused.
        """
        for stage, tiers in [*reversed(self.stages), (FIRST_STAGE, self)]:
            steps = tiers.catalog.committed_steps()
            if steps:
                return steps[-1], stage.steps_before + steps[-1]
        return -1, -1

    def name(self, storage: Storage) -> str:
        """Return what a tier is called in journals and lists. A single one is called `local` if it is a directory."""
        if self.local is None:
            return LOCAL if storage.root is not None else REMOTE
        return LOCAL if storage is self.local else REMOTE


def open_tiers(location: str, local_tier: str | None = None) -> Tiers:
    """Open the durable location, and the directory in front of it, if any. Connects to nothing yet.

    Args:
        location: Path or URL.
        local_tier: Directory of this machine.

    Returns:
        The tiers.

    Raises:
        ValueError: One of them is not usable.
    """
    durable = open_storage(location)
    if local_tier is None:
        return Tiers(durable)
    local = open_storage(local_tier)
    if local.root is None:
        raise ValueError(f"checkpoint.local_tier {local_tier!r} is not allowed; give a directory of this machine")
    if durable.root is not None and durable.root.absolute() == local.root.absolute():
        raise ValueError(f"checkpoint.local_tier {local_tier!r} is checkpoint.location itself; leave it out")
    return Tiers(durable, local)


# Characters of a location that do not appear in the name of a stage.
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")
_LONGEST_NAME = 60
STAGE_NAME = re.compile(r"stage-([2-9]|[1-9][0-9]{1,8})(?:-[A-Za-z0-9_.-]{1,60})?")


@dataclass(frozen=True)
class TrainingStage:
    """One training of a run.

    Attributes:
        name: Folder inside the run's location; empty for the first stage, which uses the location itself.
        number: Number of the stage, from 1, in the order in which stages are entered.
        steps_before: Steps that earlier stages of this run have finished.
    """

    name: str = ""
    number: int = 1
    steps_before: int = 0

    def inside(self, location: str) -> str:
        """Return the location of the stage's checkpoints, given the run's."""
        return f"{location.rstrip('/')}/{self.name}" if self.name else location

    def to_json(self) -> bytes:
        """Return the stage as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> TrainingStage | None:
        """Parse what `to_json` returned; None for anything else."""
        try:
            body = json.loads(data)
            stage = cls(body["name"], body["number"], body["steps_before"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        counts = (stage.number, stage.steps_before)
        named = isinstance(stage.name, str) and STAGE_NAME.fullmatch(stage.name)
        return stage if named and all(type(n) is int and 0 <= n < 2**63 for n in counts) else None


FIRST_STAGE = TrainingStage()


class TrainingStages:
    """The stages of one process. A script that is restarted enters them in the same order."""

    def __init__(self) -> None:
        self._entered: list[tuple[str, int]] = []
        self._steps: dict[tuple[str, int], int] = {}
        self._finished: Counter[str] = Counter()

    @property
    def were_entered(self) -> bool:
        """Whether a training of this process saves, or has."""
        return bool(self._entered)

    def enter(self, location: str, *, supervised: bool) -> TrainingStage:
        """Return the stage of a training.

        A location that is used again is the same stage, unless its training has finished: then it is a new one.

        Args:
            location: Where the script keeps the training's checkpoints.
            supervised: Whether a supervisor keeps all stages at one location. Otherwise each has its own, and only a
                training that uses the same one again needs a folder inside it.

        Returns:
            The stage.
        """
        key = (location, self._finished[location])
        if key not in self._entered:
            self._entered.append(key)
        index = self._entered.index(key)
        before = sum(self._steps.get(earlier, 0) for earlier in self._entered[:index])
        if not supervised:
            number = key[1] + 1
            return TrainingStage(f"stage-{number}" if number > 1 else "", number, before)
        number = index + 1
        if number == 1:
            return FIRST_STAGE
        words = _NOT_IN_NAMES.sub("-", location.rstrip("/").rpartition("/")[2]).strip("-.")[:_LONGEST_NAME]
        return TrainingStage(f"stage-{number}-{words}" if words else f"stage-{number}", number, before)

    def leave(self, location: str, step: int, *, finished: bool) -> None:
        """Note that a training has ended after `step`; once it is finished, the next one there is a new stage."""
        key = (location, self._finished[location])
        self._steps[key] = step
        if finished:
            self._finished[location] += 1


# A process is one script.
STAGES = TrainingStages()
