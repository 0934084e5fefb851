"""Turns the staged files of one snapshot into a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from checkpointing.digest import digest_buffer
from checkpointing.errors import CommitFailed
from checkpointing.manifest import FileEntry, Manifest
from checkpointing.storage import Storage


@dataclass(frozen=True)
class StagedFile:
    """A file whose bytes lie ready in memory."""

    name: str
    data: memoryview


@dataclass(frozen=True)
class SnapshotInfo:
    """Identity of a snapshot; the fields are the manifest's."""

    run_id: str
    attempt: int
    step: int
    world_size: int
    samples_consumed: int


def commit_snapshot(storage: Storage, info: SnapshotInfo, files: Sequence[StagedFile]) -> Manifest:
    """Write the files, then the manifest; returns when the checkpoint is durable.

    The digest is taken from the staged bytes, not read back: what differs on the disk later is then seen.

    Raises:
        CommitFailed: storage refused; the temporary data has been removed.
        CommitConflict: the step is already committed.
    """
    transaction = None
    try:
        transaction = storage.begin(info.step, info.attempt)
        entries = []
        for file in files:
            transaction.write(file.name, file.data)
            entries.append(FileEntry(file.name, len(file.data), digest_buffer(file.data)))
        manifest = Manifest(
            run_id=info.run_id,
            attempt=info.attempt,
            step=info.step,
            world_size=info.world_size,
            samples_consumed=info.samples_consumed,
            created_at=time.time(),
            files=tuple(entries),
        )
        transaction.commit(manifest)
        return manifest
    except OSError as error:
        reason = error.strerror or str(error)
        raise CommitFailed(f"checkpoint-{info.step} at {storage.location} could not be written: {reason}") from error
    finally:
        if transaction is not None:
            transaction.abort()
