"""Copies a committed checkpoint to another location, where it is committed as any other; a killed copy continues."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

from checkpointing.commit.catalog import verify
from checkpointing.commit.reading import fault, pieces_of
from checkpointing.errors import CheckpointError, CommitConflict, CommitFailed, Fenced, InvalidCheckpoint
from checkpointing.format.digest import RunningDigest, algorithm_of
from checkpointing.format.manifest import FileEntry, Manifest
from checkpointing.storage import Storage
from checkpointing.storage.base import Transaction


def check_destination(
    chosen: Iterable[Manifest],
    source: Collection[Manifest],
    destination: Storage,
    *,
    lineage: str = "",
    known: str = "",
) -> None:
    """Check, before anything is written, that a destination is of the run that checkpoints are copied from, or new.

    Otherwise its run would resume from another one's checkpoint, and count its own as superfluous. A location may hold
    several runs, each of which has continued from the one before: then the source has the destination's newest one.

    Args:
        chosen: What is to be copied.
        source: All that is at the source.
        destination: Where to.
        lineage: Which run the destination's restart state is of; empty where there is none.
        known: Likewise, for the source.

    Raises:
        CommitConflict: It is of another run.
        OSError: The destination cannot be read.
    """
    there = [found for _, found in destination.survey() if isinstance(found, Manifest)]
    newest = max(there, key=lambda one: one.step, default=None)
    identities, by_step = {one.identity for one in source}, {one.step: one for one in there}
    is_known = lineage in {"", known, *(one.run_id for one in source)}
    for manifest in chosen:
        found = by_step.get(manifest.step)
        if found is not None and found.identity != manifest.identity:
            raise _another(destination, found)
        # A run has its older checkpoints, wherever it has gone on.
        if any(one.run_id == manifest.run_id and one.step >= manifest.step for one in there):
            continue
        continues = newest is None or newest.run_id == manifest.run_id or newest.identity in identities
        if not (continues and is_known):
            owner = lineage if newest is None or continues else newest.run_id
            raise CommitConflict(
                f"{destination.location} is of another run ({owner}), which would resume from checkpoint-"
                f"{manifest.step} of run {manifest.run_id}; choose another destination"
            )


def copy_checkpoint(
    source: Storage, step: int, destination: Storage, copied: Callable[[int], None] = lambda nbytes: None
) -> bool:
    """Copy a checkpoint, all digests compared; at the destination it is valid or invisible.

    Files are written to a folder that is named after the checkpoint's identity. A file gets its name there when all its
    bytes are stored and their digest was compared, so the next copy, after a kill, leaves those out that have one.
    Where the destination does not compare what it stores with a checksum, it is read back in the end.

    Args:
        source: Where the checkpoint is.
        step: Its step.
        destination: Where to.
        copied: Called with a number of bytes as they are copied, or found to be copied.

    Returns:
        False if the destination has had this very checkpoint before.

    Raises:
        InvalidCheckpoint: It is not whole here, or was damaged on the way; nothing is committed.
        CommitConflict: The destination has another checkpoint of this step, or would never load this one.
        CommitFailed: The destination refused; what was copied stays for the next try.
        StorageUnreachable: The source cannot be read now.
    """
    manifest = source.read_manifest(step)
    if _is_there(manifest, destination):
        copied(manifest.total_bytes)
        return False
    try:
        destination.check_fence(step, manifest.attempt)
        transaction = destination.begin(step, manifest.attempt, manifest.identity, continues=True)
        _write_files(source, manifest, transaction, copied)
        try:
            transaction.commit(replace(manifest, folder=""))
        except CommitConflict:
            # Another copy of the same checkpoint may have been faster.
            transaction.abort()
            if not _is_there(manifest, destination):
                raise
            return False
        if not destination.checks_arrival:
            destination.refresh(step)
            _check_arrival(destination, step)
    except Fenced as error:
        raise CommitConflict(
            f"{source.describe(step)} is of attempt {manifest.attempt}, and would never be loaded from "
            f"{destination.location}, where a newer one has begun ({error}); choose another destination"
        ) from None
    except OSError as error:
        raise CommitFailed(
            f"{source.describe(step)} could not be copied to {destination.location}: {error.strerror or error}; the "
            "same command continues where this one ended"
        ) from error
    return True


def _is_there(manifest: Manifest, destination: Storage) -> bool:
    """Return whether the destination has this checkpoint, every digest compared.

    Raises:
        CommitConflict: It has another one of that step.
        InvalidCheckpoint: It has it, damaged.
    """
    step = manifest.step
    try:
        found = destination.read_manifest(step)
    except InvalidCheckpoint:
        # What does not count is displaced by the commit, as in a run; another program's is kept, and refused there.
        return False
    if found.identity != manifest.identity:
        raise _another(destination, found)
    verify(destination, step)
    return True


def _another(destination: Storage, found: Manifest) -> CommitConflict:
    return CommitConflict(
        f"{destination.describe(found.step)} is another checkpoint (run {found.run_id}, attempt {found.attempt}) and "
        "is kept; choose another destination"
    )


def _write_files(source: Storage, manifest: Manifest, transaction: Transaction, copied: Callable[[int], None]) -> None:
    present = transaction.written()
    for file in manifest.files:
        if present.get(file.name) == file.size:
            copied(file.size)
            continue
        pieces = _Pieces(source, manifest, file, copied)
        if file.name in present:
            transaction.withdraw([file.name])
        try:
            transaction.write(file.name, pieces.checked(), file.size)
        except Exception as error:
            # Stores wrap what their argument raises in errors of their own.
            raise (pieces.fault or error) from None


class _Pieces:
    """The bytes of a file of the source; the last of them are passed on once the digest is known to be right.

    Attributes:
        fault: Why the source cannot be copied; None as long as it can.
    """

    def __init__(self, source: Storage, manifest: Manifest, file: FileEntry, copied: Callable[[int], None]) -> None:
        self._source, self._manifest, self._file, self._copied = source, manifest, file, copied
        self.fault: CheckpointError | None = None

    def checked(self) -> Iterator[memoryview]:
        label, file, done = self._source.describe(self._manifest.step), self._file, 0
        digest = RunningDigest(algorithm_of(file.digest))
        for piece in self._read(label):
            digest.update(piece)
            done += len(piece)
            if done >= file.size and (done > file.size or digest.result() != file.digest):
                self.fault = InvalidCheckpoint(
                    label, f"{file.name} was altered: its digest differs from the manifest's"
                )
                raise self.fault
            yield piece
            self._copied(len(piece))
        if done < file.size:
            self.fault = InvalidCheckpoint(label, f"{file.name} became shorter while it was copied")
            raise self.fault

    def _read(self, label: str) -> Iterable[memoryview]:
        try:
            yield from pieces_of(self._source.file(self._manifest, self._file.name))
        except OSError as error:
            self.fault = fault(label, self._file.name, error)
            raise self.fault from None


def _check_arrival(destination: Storage, step: int) -> None:
    try:
        verify(destination, step)
    except InvalidCheckpoint as error:
        kept = destination.quarantine(step)
        raise InvalidCheckpoint(
            error.where, f"{error.reason}; the copy is kept as {kept}, and does not count"
        ) from None
