"""Copies a checkpoint out, as a plain Hugging Face directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from checkpointing.digest import digest_file
from checkpointing.errors import CheckpointError, InvalidCheckpoint
from checkpointing.manifest import FileEntry, Manifest
from checkpointing.storage import Storage

_PIECE_BYTES = 16 * 1024 * 1024
_AT_ONCE = 4


def export_checkpoint(
    storage: Storage, step: int, directory: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> Manifest:
    """Copy the files of a step into a new directory, and compare their digests; it appears whole or not at all.

    Args:
        progress: told of the bytes copied so far, and of all.

    Raises:
        InvalidCheckpoint: it is not whole, or a digest differs.
        CheckpointError: the directory exists, or cannot be written.
    """
    manifest = storage.read_manifest(step)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} exists already; choose another directory")
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    total, done = manifest.total_bytes, 0
    try:
        temporary.mkdir(parents=True)
        for file in manifest.files:
            done = _copy(storage, manifest, file, temporary, lambda count: progress(count, total), done)
            if digest_file(temporary / file.name) != file.digest:
                raise InvalidCheckpoint(storage.describe(step), f"{file.name} was altered: its digest differs")
        if directory.exists():
            directory.rmdir()
        temporary.rename(directory)
    except OSError as error:
        raise CheckpointError(f"{storage.describe(step)} could not be copied: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return manifest


def _copy(
    storage: Storage, manifest: Manifest, file: FileEntry, folder: Path, progress: Callable[[int], None], done: int
) -> int:
    source, target = storage.file(manifest, file.name), folder / file.name
    if isinstance(source, Path):
        shutil.copyfile(source, target)
        progress(done + file.size)
        return done + file.size

    def fetch(start: int) -> int:
        piece = memoryview(bytearray(min(_PIECE_BYTES, file.size - start)))
        source.read_into(start, piece)
        os.pwrite(descriptor, piece, start)
        return len(piece)

    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with ThreadPoolExecutor(_AT_ONCE, "checkpoint-export") as pool:
            for count in pool.map(fetch, range(0, file.size, _PIECE_BYTES)):
                done += count
                progress(done)
    finally:
        os.close(descriptor)
    return done
