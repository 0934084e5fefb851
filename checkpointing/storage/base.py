"""The checkpoint seam: what the commit protocol asks of a place that keeps checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from checkpointing.manifest import Manifest

CHECKPOINT_PREFIX = "checkpoint-"
# More than anybody keeps; a fence is read often.
_MAX_ACCEPTED = 1000


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
            Fenced: a newer attempt has begun.
        """

    def abort(self) -> None:
        """Remove what was written. Safe after any failure, and after `commit`."""


class RemoteFile(Protocol):
    """A file that is not on this machine, read by ranges.

    Attributes:
        nbytes: its size.
    """

    @property
    def nbytes(self) -> int: ...

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` from `start` on.

        Raises:
            OSError: it cannot be read.
        """


@dataclass(frozen=True)
class Fence:
    """The newest attempt that has begun, and what counted then.

    A checkpoint counts if its attempt is the newest, or if it was there when the newest began. So what a writer from an
    older attempt publishes later is never loaded, however late it wakes up.

    Attributes:
        accepted: step and attempt of what was published by then, damaged or not.
        writer: tells apart two that claim the same attempt.
    """

    attempt: int = 0
    accepted: frozenset[tuple[int, int]] = frozenset()
    writer: str = ""

    def admits(self, manifest: Manifest) -> bool:
        """Whether a checkpoint counts."""
        return self.admits_step(manifest.step, manifest.attempt)

    def admits_step(self, step: int, attempt: int) -> bool:
        """Whether a checkpoint of this step and attempt would count."""
        return attempt >= self.attempt or (step, attempt) in self.accepted

    def next(self, attempt: int, published: Iterable[Manifest], held: Iterable[tuple[int, int]], writer: str) -> Fence:
        """The fence of a newer attempt that finds these checkpoints. What has counted once goes on to count, so that a
        checkpoint that was set aside can be repaired and put back."""
        accepted = self.accepted | set(held) | {(m.step, m.attempt) for m in published if self.admits(m)}
        return Fence(attempt, frozenset(sorted(accepted)[-_MAX_ACCEPTED:]), writer)

    def to_json(self) -> bytes:
        return json.dumps({"attempt": self.attempt, "accepted": sorted(self.accepted), "writer": self.writer}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Fence:
        """Parse what `to_json` made.

        Raises:
            ValueError: it is something else.
        """
        try:
            body = json.loads(data)
            accepted = frozenset((int(step), int(attempt)) for step, attempt in body["accepted"])
            return cls(int(body["attempt"]), accepted, str(body["writer"]))
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a fence: {error}") from None


class Storage(Protocol):
    """A place that keeps checkpoints, named by `location`."""

    location: str

    def probe(self) -> None:
        """See whether a run could write there; changes nothing.

        Raises:
            OSError: something that a run needs is refused; the text says what.
        """

    def begin_attempt(self, attempt: int, held: Iterable[tuple[int, int]] = ()) -> None:
        """Fence all older attempts: nothing that they publish from now on is ever loaded.

        Args:
            held: step and attempt of what the caller itself has yet to publish of older attempts.

        Raises:
            Fenced: this attempt or a newer one has begun already.
            OSError: storage refused.
        """

    def fence(self) -> Fence:
        """The newest attempt that has begun.

        Raises:
            OSError: storage refused.
        """

    def begin(self, step: int, attempt: int) -> Transaction:
        """Start writing the checkpoint of a step."""

    def steps(self) -> list[int]:
        """Steps of everything that is named like a checkpoint, valid or not, ascending."""

    def read_manifest(self, step: int) -> Manifest:
        """The manifest of a step, its files checked for presence and size, not for content.

        Raises:
            InvalidCheckpoint: there is no whole manifest, or a file is missing or of another size.
        """

    def describe(self, step: int) -> str:
        """What a checkpoint is called in messages: its path or URL."""

    def directory(self, step: int) -> Path | None:
        """The local directory that holds the checkpoint's files, if there is one."""

    def file(self, manifest: Manifest, name: str) -> Path | RemoteFile:
        """A file of a checkpoint, to be read."""

    def remove(self, step: int) -> None:
        """Delete a checkpoint: manifest first, so that a crash in between leaves nothing that looks whole."""

    def set_aside(self, step: int, label: str = "invalid") -> str:
        """Rename a checkpoint so that nothing resumes from it (`invalid` or `superseded`); returns where it is kept."""

    def set_aside_names(self) -> list[str]:
        """What `set_aside` has kept: proof that this run once had checkpoints."""

    def sweep(self) -> list[str]:
        """Remove what dead writers left half written; returns the names."""
