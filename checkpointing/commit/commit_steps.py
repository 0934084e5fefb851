"""Who writes the files of a checkpoint: one node, or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from checkpointing.format.manifest import FileEntry, SnapshotInfo
from checkpointing.storage import Storage
from checkpointing.storage.base import Transaction


@dataclass(frozen=True)
class StagedFile:
    """A file whose bytes are in memory, or arrive piece by piece.

    Attributes:
        name: Name of the file inside the checkpoint.
        pieces: Its bytes, in order. A sequence if all are in memory; each piece of an iterator lasts until the next.
        digest: Returns the digest of all bytes; called once they have been written. If it raises a CheckpointError,
            nothing is published.
        nbytes: The file's size, where the pieces do not tell it and it is known.
    """

    name: str
    pieces: Iterable[memoryview]
    digest: Callable[[], str]
    nbytes: int | None = None


class CommitSteps:
    """What the node that commits does, step by step; here, it writes everything itself.

    Where several nodes write, `ReplicatedCommit` and `ShardedCommit` take its place. They differ in who writes what.

    Attributes:
        gave_up: Why it had to write alone what several nodes were to write; None where it had not.
    """

    gave_up: str | None = None

    @property
    def nodes_that_write(self) -> int:
        """Number of nodes that have written the checkpoint, as far as its event says it."""
        return 1

    @property
    def others_bytes(self) -> int:
        """How much of the files that this node holds other nodes write, in bytes."""
        return 0

    def begin(self, storage: Storage, info: SnapshotInfo) -> Transaction:
        """Begin, so that the other nodes may write.

        Raises:
            OSError: Storage refused.
            CommitFailed: Likewise.
        """
        return storage.begin(info.step, info.attempt)

    def write(self, transaction: Transaction, file: StagedFile) -> int:
        """Write this node's part of a file; return the size of the whole file in bytes.

        Raises:
            OSError: Storage refused.
        """
        return transaction.write(file.name, file.pieces, file.nbytes)

    def complete(self, transaction: Transaction, own: Iterable[str]) -> list[FileEntry]:
        """Wait until the other nodes have written; return the files that this node did not write.

        Args:
            transaction: The save.
            own: Names of those that it did.

        Raises:
            OSError: Storage refused.
            CommitFailed: Another node has not written.
        """
        return []

    def abandon(self) -> None:
        """Remove what was begun, where the commit was not reached."""
