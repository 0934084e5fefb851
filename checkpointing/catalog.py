"""What checkpoints exist, in one place or in several, and which of them may be loaded."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from checkpointing.digest import algorithm_of
from checkpointing.errors import ForeignCheckpoint, InvalidCheckpoint
from checkpointing.manifest import Manifest
from checkpointing.reading import digest_of, fault
from checkpointing.storage import Storage
from checkpointing.storage.fence import Fence


@dataclass(frozen=True)
class CatalogEntry:
    """One thing that is named like a checkpoint: `manifest` where it is whole, else `problem`.

    Attributes:
        is_foreign: this library has not written it.
    """

    storage: Storage
    step: int
    manifest: Manifest | None
    problem: str | None
    is_foreign: bool = False


class Catalog:
    """Reads storages; changes nothing.

    Of several, which hold copies of the same run's checkpoints, the nearest is given first and the durable one last:
    that one's fence counts for all.
    """

    def __init__(self, *storages: Storage) -> None:
        self.storages = storages

    def scan(self) -> Iterator[CatalogEntry]:
        """All entries, newest step first, of one step the nearest first. Sizes are checked, contents are not.

        Raises:
            OSError: a storage refused.
        """
        fence = self.storages[-1].fence()
        streams = [_entries(storage, fence, rank) for rank, storage in enumerate(self.storages)]
        return (entry for *_, entry in heapq.merge(*streams, key=lambda item: item[:2]))

    def entries(self) -> list[CatalogEntry]:
        """What `scan` finds."""
        return list(self.scan())

    def committed_steps(self) -> list[int]:
        """Steps of whole checkpoints, ascending."""
        return sorted({entry.step for entry in self.scan() if entry.manifest is not None})

    def newest_attempt(self) -> int:
        """The newest attempt that has begun or published anything, 0 before the first."""
        attempts = [storage.fence().attempt for storage in self.storages]
        return max([*attempts, *(entry.manifest.attempt for entry in self.scan() if entry.manifest is not None)])

    def find(self, step: int) -> CatalogEntry:
        """The nearest whole copy of a step.

        Raises:
            InvalidCheckpoint: there is none; the text lists the steps that are committed.
        """
        entries = self.entries()
        copies = [entry for entry in entries if entry.step == step]
        for entry in copies:
            if entry.manifest is not None:
                return entry
        steps = ", ".join(str(number) for number in sorted({e.step for e in entries if e.manifest})) or "none"
        reason = copies[0].problem if copies else "there is no such checkpoint"
        place = (copies[0].storage if copies else self.storages[-1]).describe(step)
        raise InvalidCheckpoint(place, f"{reason}; committed steps: {steps}")

    def verify(self, step: int, read: Callable[[int], None] = lambda nbytes: None) -> Manifest:
        """Read the nearest copy of a step again and compare every digest.

        Raises:
            InvalidCheckpoint: it is not whole, or a digest differs.
        StorageUnreachable: it cannot be read now.
        """
        return verify(self.find(step).storage, step, read)


def verify(storage: Storage, step: int, read: Callable[[int], None] = lambda nbytes: None) -> Manifest:
    """Read a checkpoint's files again and compare every digest; `read` is told the size of each file that was read.

    Raises:
        InvalidCheckpoint: it is not whole, or a digest differs.
        StorageUnreachable: it cannot be read now.
    """
    manifest = storage.read_manifest(step)
    place = storage.describe(step)
    for file in manifest.files:
        try:
            actual = digest_of(storage.file(manifest, file.name), algorithm_of(file.digest))
        except OSError as error:
            raise fault(place, file.name, error) from None
        if actual != file.digest:
            raise InvalidCheckpoint(place, f"{file.name} was altered: its digest differs from the manifest's")
        read(file.size)
    return manifest


def _entries(storage: Storage, fence: Fence, rank: int) -> Iterable[tuple[int, int, CatalogEntry]]:
    for step, found in storage.survey():
        if isinstance(found, InvalidCheckpoint):
            entry = CatalogEntry(storage, step, None, found.reason, isinstance(found, ForeignCheckpoint))
        elif not fence.admits(found):
            problem = f"attempt {found.attempt} published it after a newer one had begun elsewhere"
            entry = CatalogEntry(storage, step, None, problem)
        else:
            entry = CatalogEntry(storage, step, found, None)
        yield -step, rank, entry
