"""Where a run's checkpoints lie: the durable place, and optionally a fast directory of this machine in front of it."""

from __future__ import annotations

from dataclasses import dataclass

from checkpointing.catalog import Catalog
from checkpointing.stages import FIRST_STAGE, Stage
from checkpointing.storage import Storage, open_storage

LOCAL, REMOTE = "local", "remote"
# A local tier is for speed; what is kept for long is kept in the durable one.
DEFAULT_LOCAL_KEEP_LAST = 2


@dataclass(frozen=True)
class Tiers:
    """Checkpoints are committed to the first, and copied to `durable` in the background."""

    durable: Storage
    local: Storage | None = None

    @property
    def first(self) -> Storage:
        """Where a snapshot is committed."""
        return self.local or self.durable

    @property
    def nearest_first(self) -> tuple[Storage, ...]:
        return (self.durable,) if self.local is None else (self.local, self.durable)

    @property
    def catalog(self) -> Catalog:
        return Catalog(*self.nearest_first)

    def inside(self, stage: Stage) -> Tiers:
        """Where one of the run's trainings keeps its checkpoints."""
        local = stage.inside(self.local.location) if self.local is not None else None
        return open_tiers(stage.inside(self.durable.location), local)

    @property
    def stages(self) -> list[tuple[Stage, Tiers]]:
        """The run's trainings after its first one, in their order, and where their checkpoints lie.

        Raises:
            OSError: a storage refused.
        """
        found = []
        for name in self.durable.sidecars.sizes("stage-"):
            stage = Stage.from_json(self.durable.sidecars.read(name))
            if stage is not None:
                found.append((stage, self.inside(stage)))
        return sorted(found, key=lambda item: item[0].number)

    def newest_committed(self) -> tuple[int, int]:
        """The newest committed step of the last training that has any, and the same counted over all of them; -1 each
        where there is none.

        Raises:
            OSError: a storage refused.
        """
        for stage, tiers in [*reversed(self.stages), (FIRST_STAGE, self)]:
            steps = tiers.catalog.committed_steps()
            if steps:
                return steps[-1], stage.steps_before + steps[-1]
        return -1, -1

    def name(self, storage: Storage) -> str:
        """What a tier is called in journal and lists. A single one is named by where it is."""
        if self.local is None:
            return LOCAL if storage.root is not None else REMOTE
        return LOCAL if storage is self.local else REMOTE


def open_tiers(location: str, local_tier: str | None = None) -> Tiers:
    """Open the durable `location`, and the directory in front of it, if there is one. Talks to nobody yet.

    Raises:
        ValueError: one of them is not usable.
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
