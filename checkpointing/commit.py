"""Turns the staged files of one snapshot into a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from checkpointing.catalog import verify
from checkpointing.errors import CheckpointError, CommitConflict, CommitFailed
from checkpointing.manifest import FileEntry, Manifest, SnapshotInfo
from checkpointing.storage import Storage


@dataclass(frozen=True)
class StagedFile:
    """A file whose bytes lie ready in memory, or come piece by piece.

    Attributes:
        name: file name inside the checkpoint.
        pieces: its bytes, in order. A sequence, where all lie ready; of an iterator, each is there until the next.
        digest: of all of them; asked for when they have been written. May raise a CheckpointError: then nothing is
            published.
    """

    name: str
    pieces: Iterable[memoryview]
    digest: Callable[[], str]


def commit_snapshot(
    storage: Storage,
    info: SnapshotInfo,
    files: Sequence[StagedFile],
    may_publish: Callable[[], bool] = lambda: True,
    *,
    at_once: int = 1,
) -> Manifest:
    """Write the files, then the manifest; returns when the checkpoint is durable.

    The digest is that of the staged bytes, not of what is read back: what differs on the disk later is then seen.

    Args:
        may_publish: asked last; False drops what was written.
        at_once: so many files are written beside each other; more than one only where their pieces share no memory.

    Raises:
        CommitFailed: storage refused, or publishing was forbidden; the temporary data has been removed.
        CommitConflict: the step is already committed.
        Fenced: a newer attempt has begun.
    """
    transaction = None
    try:
        transaction = storage.begin(info.step, info.attempt)
        write = transaction.write
        if at_once == 1:
            sizes = [write(file.name, file.pieces) for file in files]
        else:
            with ThreadPoolExecutor(at_once, "checkpoint-write") as pool:
                sizes = list(pool.map(lambda file: write(file.name, file.pieces), files))
        entries = [FileEntry(file.name, size, file.digest()) for file, size in zip(files, sizes, strict=True)]
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


def _is_kept(storage: Storage, manifest: Manifest) -> bool:
    """Whether an earlier try has committed the same, and could not see that it had."""
    if not storage.keeps(manifest):
        return False
    try:
        verify(storage, manifest.step)
    except CheckpointError:
        return False
    return True
