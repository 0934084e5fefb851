"""The checkpoint seam: what the commit protocol asks of a place that keeps checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from checkpointing.manifest import Manifest

CHECKPOINT_PREFIX = "checkpoint-"


class Transaction(Protocol):
    """One checkpoint in the making. Nothing of it is visible as a checkpoint before `commit` returns."""

    def write(self, name: str, pieces: Iterable[memoryview]) -> int:
        """Store one file durably, its bytes given in order; returns its size.

        Raises:
            OSError: the storage refused it (full, read-only, failing).
        """

    def commit(self, manifest: Manifest) -> None:
        """Publish. When this returns, the checkpoint survives a power cut.

        Raises:
            OSError: the storage refused it; nothing is published.
            CommitConflict: the step is already committed.
        """

    def abort(self) -> None:
        """Remove what was written. Safe after any failure, and after `commit`."""


class Storage(Protocol):
    """A place that keeps checkpoints, named by `location`."""

    location: str

    def begin(self, step: int, attempt: int) -> Transaction:
        """Start writing the checkpoint of a step."""

    def steps(self) -> list[int]:
        """Steps of everything that is named like a checkpoint, valid or not, ascending."""

    def read_manifest(self, step: int) -> Manifest:
        """The manifest of a step, its files checked for presence and size, not for content.

        Raises:
            InvalidCheckpoint: there is no whole manifest, or a file is missing or of another size.
        """

    def local_path(self, step: int) -> Path:
        """A local directory that holds the checkpoint's files."""

    def remove(self, step: int) -> None:
        """Delete a checkpoint: manifest first, so that a crash in between leaves nothing that looks whole."""

    def set_aside(self, step: int, label: str = "invalid") -> str:
        """Rename a checkpoint so that nothing resumes from it (`invalid` or `superseded`); returns where it is kept."""

    def set_aside_names(self) -> list[str]:
        """What `set_aside` has kept: proof that this run once had checkpoints."""

    def sweep(self) -> list[str]:
        """Remove what dead writers left half written; returns the names."""
