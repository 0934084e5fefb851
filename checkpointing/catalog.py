"""What checkpoints exist, and which of them may be loaded."""

from __future__ import annotations

from dataclasses import dataclass

from checkpointing.errors import InvalidCheckpoint
from checkpointing.manifest import Manifest
from checkpointing.reading import digest_of
from checkpointing.storage import Storage


@dataclass(frozen=True)
class CatalogEntry:
    """One thing that is named like a checkpoint: `manifest` where it is whole, else `problem`."""

    step: int
    manifest: Manifest | None
    problem: str | None


class Catalog:
    """Reads a `storage`; changes nothing."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def entries(self) -> list[CatalogEntry]:
        """All entries, newest step first. Sizes are checked, contents are not: see `verify`."""
        return [
            CatalogEntry(step, None, found.reason)
            if isinstance(found, InvalidCheckpoint)
            else CatalogEntry(step, found, None)
            for step, found in self.storage.survey()
        ]

    def committed_steps(self) -> list[int]:
        """Steps of whole checkpoints, ascending."""
        return sorted(entry.step for entry in self.entries() if entry.manifest is not None)

    def verify(self, step: int, only: frozenset[str] | None = None) -> Manifest:
        """Read a checkpoint's files again and compare every digest; `only` restricts it to some file names.

        Raises:
            InvalidCheckpoint: it is not whole, or a digest differs.
        """
        manifest = self.storage.read_manifest(step)
        place = self.storage.describe(step)
        for file in manifest.files:
            if only is not None and file.name not in only:
                continue
            try:
                actual = digest_of(self.storage.file(manifest, file.name))
            except OSError as error:
                raise InvalidCheckpoint(place, f"{file.name} cannot be read ({error.strerror})") from None
            if actual != file.digest:
                raise InvalidCheckpoint(place, f"{file.name} was altered: its digest differs from the manifest's")
        return manifest
