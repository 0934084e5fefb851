"""Where a run keeps its checkpoints: a durable place, and optionally a fast directory of this machine before it."""

from __future__ import annotations

from dataclasses import dataclass

from checkpointing.commit.catalog import Catalog
from checkpointing.commit.training_stage import FIRST_STAGE, TrainingStage
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
