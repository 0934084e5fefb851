"""Which checkpoints exist, at one location or at several, and which of them may be loaded."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from checkpointing.commit.reading import digest_of, fault
from checkpointing.errors import ForeignCheckpoint, InvalidCheckpoint, StaleCheckpoint
from checkpointing.format.digest import algorithm_of, digest_buffer
from checkpointing.format.manifest import FileEntry, Manifest
from checkpointing.storage import Storage
from checkpointing.storage.fence import Fence


@dataclass(frozen=True)
class CatalogEntry:
    """Something that is named like a checkpoint.

    Attributes:
        storage: Where it is.
        step: Its step.
        manifest: Its manifest, if it is whole.
        problem: Otherwise, why it is not loaded.
        is_foreign: Whether it was not written by this library.
        is_stale: Whether it does not count, whatever its bytes are: a newer attempt had begun, or it is not finite.
    """

    storage: Storage
    step: int
    manifest: Manifest | None
    problem: str | None
    is_foreign: bool = False
    is_stale: bool = False


class Catalog:
    """The checkpoints of one storage, or of several that hold copies of the same run's. Changes nothing.

    Of several, the nearest is given first and the durable one last: its fence applies to all.

    Attributes:
        storages: Where to look.
    """

    def __init__(self, *storages: Storage) -> None:
        self.storages = storages

    def scan(self) -> Iterator[CatalogEntry]:
        """Return all entries, newest step first, and of one step the nearest first.

        Sizes are checked, contents are not.

        Raises:
            OSError: A storage refused.
        """
        fence = self.storages[-1].fence()
        streams = [_entries(storage, fence, rank) for rank, storage in enumerate(self.storages)]
        return (entry for *_, entry in heapq.merge(*streams, key=lambda item: item[:2]))

    def entries(self) -> list[CatalogEntry]:
        """Return what `scan` finds."""
        return list(self.scan())

    def committed_steps(self) -> list[int]:
        """Return the steps of whole checkpoints, ascending."""
        return sorted({entry.step for entry in self.scan() if entry.manifest is not None})

    def newest_attempt(self) -> int:
        """Return the newest attempt that has begun or published anything; 0 before the first."""
        attempts = [storage.fence().attempt for storage in self.storages]
        return max([*attempts, *(entry.manifest.attempt for entry in self.scan() if entry.manifest is not None)])

    def find(self, step: int) -> CatalogEntry:
        """Return the nearest whole copy of a step.

        Raises:
            InvalidCheckpoint: There is none; the message lists the committed steps.
        """
        entries = self.entries()
        copies = [entry for entry in entries if entry.step == step]
        for entry in copies:
            if entry.manifest is not None:
                return entry
        steps = ", ".join(str(number) for number in sorted({e.step for e in entries if e.manifest})) or "none"
        reason = copies[0].problem if copies else "there is no such checkpoint"
        label = (copies[0].storage if copies else self.storages[-1]).describe(step)
        raise InvalidCheckpoint(label, f"{reason}; committed steps: {steps}")

    def verify(self, step: int, read: Callable[[int], None] = lambda nbytes: None) -> Manifest:
        """Read the nearest copy of a step and compare every digest.

        Args:
            step: The step.
            read: Called with the size in bytes of each file that was read.

        Returns:
            Its manifest.

        Raises:
            InvalidCheckpoint: It is not whole, or a digest differs.
            StorageUnreachable: It cannot be read now.
        """
        return verify(self.find(step).storage, step, read)


def verify(storage: Storage, step: int, read: Callable[[int], None] = lambda nbytes: None) -> Manifest:
    """Read a checkpoint's files and compare every digest.

    Args:
        storage: Where it is.
        step: Its step.
        read: Called with the size in bytes of each file that was read.

    Returns:
        Its manifest.

    Raises:
        InvalidCheckpoint: It is not whole, or a digest differs.
        StorageUnreachable: It cannot be read now.
    """
    manifest = storage.read_manifest(step)
    for file in manifest.files:
        check_digest(storage, manifest, file)
        read(file.size)
    return manifest


def check_digest(storage: Storage, manifest: Manifest, file: FileEntry) -> None:
    """Read a file of a checkpoint; raises as `verify` does."""
    label = storage.describe(manifest.step)
    try:
        actual = digest_of(storage.file(manifest, file.name), algorithm_of(file.digest))
    except OSError as error:
        raise fault(label, file.name, error) from None
    if actual != file.digest:
        raise InvalidCheckpoint(label, f"{file.name} was altered: its digest differs from the manifest's")


def read_file(storage: Storage, manifest: Manifest, name: str) -> bytes:
    """Return a small file of a checkpoint, whose digest is compared; nothing where the checkpoint has none.

    Raises:
        InvalidCheckpoint: It cannot be read as it was written.
        StorageUnreachable: It cannot be read now.
    """
    entry = next((file for file in manifest.files if file.name == name), None)
    if entry is None:
        return b""
    label, file, data = storage.describe(manifest.step), storage.file(manifest, name), bytearray(entry.size)
    try:
        if isinstance(file, Path):
            data[:] = file.read_bytes()
        else:
            file.read_into(0, memoryview(data))
    except OSError as error:
        raise fault(label, name, error) from None
    if digest_buffer(bytes(data), algorithm_of(entry.digest)) != entry.digest:
        raise InvalidCheckpoint(label, f"{name} was altered: its digest differs from the manifest's")
    return bytes(data)


def _entries(storage: Storage, fence: Fence, rank: int) -> Iterable[tuple[int, int, CatalogEntry]]:
    for step, found in storage.survey():
        if isinstance(found, ForeignCheckpoint):
            entry = CatalogEntry(storage, step, None, found.reason, is_foreign=True)
        elif isinstance(found, InvalidCheckpoint):
            if not storage.has_step(step):
                continue  # its run has pruned it meanwhile
            entry = CatalogEntry(storage, step, None, found.reason, is_stale=isinstance(found, StaleCheckpoint))
        elif not fence.admits(found):
            problem = f"attempt {found.attempt} published it after a newer one had begun elsewhere"
            entry = CatalogEntry(storage, step, None, problem, is_stale=True)
        elif found.not_finite:
            problem = f"kept for a post-mortem: {', '.join(found.not_finite[:3])} hold NaN or infinity"
            entry = CatalogEntry(storage, step, None, problem, is_stale=True)
        else:
            entry = CatalogEntry(storage, step, found, None)
        yield -step, rank, entry
