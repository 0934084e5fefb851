"""Where the runs of a campaign keep their checkpoints: on the job's own storage, apart from its own checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointing.commit.tiers import Tiers, open_tiers

if TYPE_CHECKING:
    from runner.config.schema import Config


class Locations:
    """Checkpoint locations of a campaign's runs, named after their folders."""

    def __init__(self, config: Config, campaign: str) -> None:
        """Keep the job's own locations as the parents.

        Args:
            config: The job.
            campaign: Name of the campaign.
        """
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
