"""Publishes the staged files of one snapshot as a checkpoint."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from checkpointing.commit.catalog import verify
from checkpointing.commit.replicated_save import SplitSave
from checkpointing.commit.sharded_save import Begun, await_shards
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


def commit_snapshot(
    storage: Storage,
    info: SnapshotInfo,
    files: Sequence[StagedFile],
    may_publish: Callable[[], bool] = lambda: True,
    *,
    at_once: int = 1,
    together: Callable[[], Begun] | None = None,
    split: SplitSave | None = None,
    is_current: Callable[[], bool] = lambda: True,
) -> Manifest:
    """Write the files, then the manifest; return when the checkpoint is durable.

    The digests are those of the staged bytes, not of what is read back, so that damage on the disk is detected later.

    Args:
        storage: Where to publish.
        info: What the files are of.
        files: The files.
        may_publish: Asked last; False drops what was written.
        at_once: Number of files to write in parallel; more than one only if their pieces share no memory.
        together: Returns the save, where other nodes write the shards that are not among the files.
        split: The save, where other nodes write parts of the large files.
        is_current: Whether the attempt runs still; otherwise the other nodes get less time.

    Returns:
        The manifest that was published.

    Raises:
        CommitFailed: Storage refused, publishing was forbidden, or another node has not written its shards; the
            temporary data has been removed.
        CommitConflict: The step is already committed.
        Fenced: A newer attempt has begun.
    """
    transaction = None
    try:
        begun = together() if together is not None else None
        if begun is not None:
            transaction = begun.transaction
        else:
            transaction = storage.begin(info.step, info.attempt, split.split.identity if split is not None else "")
        if split is not None:
            split.begin(transaction)
        sizes = _write_all(functools.partial(_write, transaction, split), files, at_once)
        if split is not None:
            split.complete(is_current)
        entries = [FileEntry(file.name, size, file.digest()) for file, size in zip(files, sizes, strict=True)]
        if begun is not None:
            own = {file.name for file in files}
            others = [name for name in begun.together.shards if name not in own]
            entries += [begun.file, *await_shards(transaction, others, is_current)]
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


def _write(transaction: Transaction, split: SplitSave | None, file: StagedFile) -> int:
    if split is not None and split.holds(file.name):
        return split.write(file.name)
    return transaction.write(file.name, file.pieces, file.nbytes)


def _is_kept(storage: Storage, manifest: Manifest) -> bool:
    """Return whether an earlier try has committed the same checkpoint without noticing."""
    if not storage.keeps(manifest):
        return False
    try:
        verify(storage, manifest.step)
    except CheckpointError:
        return False
    return True
