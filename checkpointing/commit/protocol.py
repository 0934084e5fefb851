"""Publishes the staged files of one snapshot as a checkpoint."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from checkpointing.commit.catalog import verify
from checkpointing.errors import CheckpointError, CommitConflict, CommitFailed
from checkpointing.format.manifest import FileEntry, Manifest, SnapshotInfo
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

    def complete(self, transaction: Transaction, own: Callable[[], list[FileEntry]]) -> list[FileEntry]:
        """Wait until the other nodes have written; return all files of the checkpoint.

        Args:
            transaction: The save.
            own: Returns the files that this node has written, whose memory is compared for that: before a wait for what
                others write, but after all that this node still writes from it.

        Raises:
            OSError: Storage refused.
            CommitFailed: Another node has not written.
        """
        return own()

    def abandon(self) -> None:
        """Remove what was begun, where the commit was not reached."""


def commit_snapshot(
    storage: Storage,
    info: SnapshotInfo,
    files: Sequence[StagedFile],
    may_publish: Callable[[], bool] = lambda: True,
    *,
    at_once: int = 1,
    save: CommitSteps | None = None,
) -> Manifest:
    """Write the files, then the manifest; return when the checkpoint is durable.

    The digests are those of the staged bytes, not of what is read back, so that damage on the disk is detected later.

    Args:
        storage: Where to publish.
        info: What the files are of.
        files: The files.
        may_publish: Asked last; False drops what was written.
        at_once: Number of files to write in parallel; more than one only if their pieces share no memory.
        save: Who writes the files; None where this node writes all.

    Returns:
        The manifest that was published.

    Raises:
        CommitFailed: Storage refused, publishing was forbidden, or another node has not written its shards; the
            temporary data has been removed.
        CommitConflict: The step is already committed.
        Fenced: A newer attempt has begun.
    """
    transaction, save = None, save or CommitSteps()
    try:
        transaction = save.begin(storage, info)
        sizes = _write_all(functools.partial(save.write, transaction), files, at_once)
        entries = save.complete(
            transaction,
            lambda: [FileEntry(file.name, size, file.digest()) for file, size in zip(files, sizes, strict=True)],
        )
        manifest = Manifest(**asdict(info), created_at=time.time(), files=tuple(entries))
        if not may_publish():
            raise CommitFailed(f"checkpoint-{info.step} was found damaged in memory and is not published")
        try:
            transaction.commit(manifest)
        except CommitConflict:
            if not _is_kept(storage, manifest):
                raise
        return manifest
    except OSError as error:
        reason = error.strerror or str(error)
        raise CommitFailed(f"checkpoint-{info.step} at {storage.location} could not be written: {reason}") from error
    finally:
        if transaction is not None:
            transaction.abort()


def _write_all(write: Callable[[StagedFile], int], files: Sequence[StagedFile], at_once: int) -> list[int]:
    if at_once == 1:
        return list(map(write, files))
    with ThreadPoolExecutor(at_once, "checkpoint-write") as pool:
        return list(pool.map(write, files))


def _is_kept(storage: Storage, manifest: Manifest) -> bool:
    """Return whether an earlier try has committed the same checkpoint without noticing."""
    if not storage.keeps(manifest):
        return False
    try:
        verify(storage, manifest.step)
    except CheckpointError:
        return False
    return True
