"""Publishes the staged files of one snapshot as a checkpoint."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from checkpointing.commit.catalog import verify
from checkpointing.commit.commit_steps import CommitSteps, StagedFile
from checkpointing.errors import CheckpointError, CommitConflict, CommitFailed
from checkpointing.format.manifest import FileEntry, Manifest, SnapshotInfo
from checkpointing.storage import Storage


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
        others = save.complete(transaction, [file.name for file in files])
        entries = [FileEntry(file.name, size, file.digest()) for file, size in zip(files, sizes, strict=True)]
        entries += others
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
