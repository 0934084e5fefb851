"""Copies a checkpoint into a plain Hugging Face directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from checkpointing.digest import RunningDigest, algorithm_of, digesting
from checkpointing.errors import CheckpointError, InvalidCheckpoint
from checkpointing.manifest import Manifest
from checkpointing.reading import pieces_of
from checkpointing.storage import Storage
from checkpointing.storage.direct_io import write_file


def export_checkpoint(
    storage: Storage, step: int, directory: Path, copied: Callable[[int], None] = lambda nbytes: None
) -> Manifest:
    """Copy the files of a step into a new directory, and compare their digests; it appears whole or not at all.

    Args:
        storage: Where the checkpoint is.
        step: Its step.
        directory: New or empty directory.
        copied: Called with a number of bytes as they are copied.

    Returns:
        The checkpoint's manifest.

    Raises:
        InvalidCheckpoint: It is not whole, or a digest differs.
        CheckpointError: The directory exists, or cannot be written.
    """
    manifest = storage.read_manifest(step)
    if directory.resolve() == Path.cwd():
        raise CheckpointError("the current directory is not replaced; name a new one")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} exists already; choose another directory")
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")

    def counted(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            yield piece
            copied(len(piece))

    try:
        temporary.mkdir(parents=True)
        for file in manifest.files:
            digest = RunningDigest(algorithm_of(file.digest))
            (temporary / file.name).parent.mkdir(parents=True, exist_ok=True)
            write_file(temporary / file.name, digesting(counted(pieces_of(storage.file(manifest, file.name))), digest))
            if digest.result() != file.digest:
                raise InvalidCheckpoint(storage.describe(step), f"{file.name} was altered: its digest differs")
        if directory.exists():
            directory.rmdir()
        temporary.rename(directory)
    except OSError as error:
        raise CheckpointError(f"{storage.describe(step)} could not be copied: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return manifest
