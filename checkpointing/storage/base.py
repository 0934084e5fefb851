"""The checkpoint seam: what the commit protocol asks of a place that keeps checkpoints."""

from __future__ import annotations

import contextlib
import errno
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from checkpointing.errors import CommitConflict, Fenced, ForeignCheckpoint, InvalidCheckpoint
from checkpointing.failpoints import failpoint
from checkpointing.manifest import MANIFEST_NAME, Manifest
from checkpointing.storage.fence import MAX_ACCEPTED, Fence, attempt_of
from checkpointing.storage.rates import Rates

CHECKPOINT_PREFIX = "checkpoint-"
# A step or an attempt in a name, as we write it: not 007, nor another script's digits, which int() would take.
NUMBER = r"(?:0|[1-9][0-9]{0,17})"
# In place of its size, for what lies where a file should: a symbolic link, a pipe, a device.
IRREGULAR = -1


class Transaction(Protocol):
    """One checkpoint in the making. Nothing of it is visible as a checkpoint before `commit` returns."""

    def write(self, name: str, pieces: Iterable[memoryview]) -> int:
        """Store one file durably, its bytes given in order; returns its size.

        A piece may be overwritten when the next is asked for, unless they are a sequence.

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


class Storage(ABC):
    """A place that keeps checkpoints, named by `location`."""

    location: str
    # The directory of this machine that holds everything, where there is one: files in it can be renamed and locked.
    root: Path | None = None
    # How many files are best written beside each other.
    writes_at_once = 1
    # The attempt that we have begun here, or tried to, and what marks it as ours; none for who publishes for another.
    _claim = (-1, "")

    def begin_attempt(self, attempt: int, held: Iterable[tuple[int, int]] = ()) -> None:
        """Fence all older attempts: nothing that they publish from now on is ever loaded.

        Args:
            held: step and attempt of what the caller itself has yet to publish of older attempts.

        Raises:
            Fenced: this attempt or a newer one has begun already.
            OSError: storage refused.
        """
        fence = self.fence()
        if self._claim[0] != attempt:
            self._claim = (attempt, uuid.uuid4().hex)
        if not (fence.attempt == attempt and fence.writer == self._claim[1]):
            if fence.attempt >= attempt:
                raise Fenced(fence.attempt, self.location, attempt)
            fence = Fence(attempt, fence.accepted | set(held), self._claim[1], fence.oldest)
            self._put_fence(fence)
            failpoint("fence.opened")
        if fence.oldest == attempt:
            return  # an earlier try of ours, whose answer was lost
        # What has counted once goes on to count, so that what was set aside can be repaired and put back.
        accepted = sorted(self.counting() | set(held))[-MAX_ACCEPTED:]
        self._put_fence(Fence(attempt, frozenset(accepted), self._claim[1], attempt))
        failpoint("fence.published")

    def has_begun(self, attempt: int) -> bool:
        """Whether we have begun this attempt here."""
        return self._claim[0] == attempt

    def check_fence(self, step: int, attempt: int) -> None:
        """See whether a checkpoint of this step and attempt will count.

        Where the place does not decide between two that begin the same attempt, the fence's last writer holds it.

        Raises:
            Fenced: it will not, or that is not known.
            OSError: storage refused.
        """
        fence = self.fence()
        if self._claim[0] == attempt and fence.attempt < attempt:
            # We have written it: this is another place than the one where the attempt began.
            raise OSError(
                errno.ESTALE,
                f"{self.location} was emptied, moved or replaced since attempt {attempt} began: its fence is gone; "
                "put it back, or start again with the location where it is now",
            )
        superseded = fence.attempt == attempt == self._claim[0] and fence.writer != self._claim[1]
        if superseded or not fence.lets_publish(step, attempt):
            raise Fenced(fence.attempt, self.location, attempt)

    def _outlives(self, attempt: int) -> bool:
        """Whether what a writer of this attempt has left half written is for our sweep: not if he may outlive us."""
        return self._claim[0] < 0 or attempt <= self._claim[0]

    def foreign_steps(self) -> list[int]:
        """Steps of what is named like a checkpoint, but was not written by this library."""
        return [step for step, found in self.survey() if isinstance(found, ForeignCheckpoint)]

    def make_way(self, step: int, attempt: int) -> None:
        """Set aside what holds a checkpoint's place but does not count: an older attempt published it too late.

        Raises:
            Fenced: a newer attempt has begun.
            CommitConflict: it was not written by this library.
            OSError: storage refused.
        """
        try:
            self.read_manifest(step)
        except ForeignCheckpoint:
            raise CommitConflict(
                f"{self.describe(step)} was not written by this library and is kept: this copy is dropped. Train in "
                "another output_dir, or move it away"
            ) from None
        except InvalidCheckpoint:
            # It may have made way itself, and have published since.
            self.check_fence(step, attempt)
            self.set_aside(step)

    def read_manifest(self, step: int) -> Manifest:
        """The manifest of a step, its files checked for presence and size, not for content.

        Raises:
            InvalidCheckpoint: there is no whole manifest, or a file is missing or of another size.
            OSError: storage refused.
        """
        return self._checked(step, self.fence(), self._sizes(step))

    def keeps(self, manifest: Manifest) -> bool:
        """Whether this very checkpoint is here: an earlier try has published it, and could not see that it had.

        If so, it is durable when this returns.

        Raises:
            OSError: storage refused.
        """
        try:
            kept = self.read_manifest(manifest.step)
        except InvalidCheckpoint:
            return False
        return (kept.info, kept.files) == (manifest.info, manifest.files)

    def survey(self) -> Iterator[tuple[int, Manifest | InvalidCheckpoint]]:
        """Everything that is named like a checkpoint, newest first: its manifest, or why it does not count.

        Raises:
            OSError: storage refused.
        """
        # In this order: what a newer attempt publishes meanwhile counts.
        fence, sizes = self.fence(), self._sizes()
        for step in sorted(self._steps(sizes), reverse=True):
            try:
                yield step, self._checked(step, fence, sizes)
            except InvalidCheckpoint as error:
                yield step, error

    def steps(self) -> list[int]:
        """Steps of everything that is named like a checkpoint, valid or not, ascending."""
        return sorted(self._steps(self._sizes()))

    def counting(self) -> frozenset[tuple[int, int]]:
        """Step and attempt of every checkpoint that counts, damaged or not.

        Raises:
            OSError: storage refused.
        """
        fence = self.fence()
        return fence.accepted | {(m.step, m.attempt) for m in self._published() if fence.admits(m)}

    def _checked(self, step: int, fence: Fence, sizes: Mapping[str, int]) -> Manifest:
        place = self.describe(step)
        try:
            manifest = self._manifest(step)
        except InvalidCheckpoint:
            own = f"{CHECKPOINT_PREFIX}{step}/"
            names = [name.removeprefix(own) for name in sizes if name.startswith(own)]
            if self._are_foreign(names):
                raise ForeignCheckpoint(place, f"it has no {MANIFEST_NAME}: this library has not written it") from None
            raise
        if manifest.step != step:
            raise InvalidCheckpoint(place, f"{MANIFEST_NAME} is of step {manifest.step}")
        if not fence.admits(manifest):
            raise InvalidCheckpoint(place, f"attempt {manifest.attempt} published it after a newer one had begun")
        folder = manifest.folder or f"{CHECKPOINT_PREFIX}{step}"
        for file in manifest.files:
            size = sizes.get(f"{folder}/{file.name}")
            if size is None:
                raise InvalidCheckpoint(place, f"{file.name} cannot be read (it is missing)")
            if size == IRREGULAR:
                raise InvalidCheckpoint(place, f"{file.name} is not a regular file of its folder (a link, a pipe)")
            if size != file.size:
                raise InvalidCheckpoint(place, f"{file.name} has {size} bytes, the manifest says {file.size}")
        return manifest

    def _are_foreign(self, names: Sequence[str]) -> bool:
        """Whether files of these names, among which no manifest could be read, are somebody else's checkpoint."""
        return False

    def _published(self) -> Iterator[Manifest]:
        for step in self.steps():
            with contextlib.suppress(InvalidCheckpoint):
                yield self._manifest(step)

    # -- what each place does in its own way ---------------------------------------------------------------------

    @abstractmethod
    def probe(self) -> str | None:
        """See whether a run could write there; changes nothing. Returns what the user ought to know about the place.

        Raises:
            OSError: something that a run needs is refused; the text says what.
        """

    @property
    def decides_between_writers(self) -> bool:
        """Whether the place itself lets one of two writers win that publish at the same moment.

        Raises:
            OSError: storage refused.
        """
        return True

    def free_bytes(self) -> int | None:
        """Return how much more can be stored; None where there is no limit that is known.

        Raises:
            OSError: storage refused.
        """
        return None

    @abstractmethod
    def measure(self, checkpoint_bytes: int) -> Rates | None:
        """Measure how fast checkpoints of this size are written and read; None where there is no room to try.

        Raises:
            OSError: storage refused.
        """

    @abstractmethod
    def remove_all(self) -> None:
        """Remove everything that is kept at this location.

        Raises:
            OSError: storage refused.
        """

    @abstractmethod
    def watch(self, transferred: Callable[[int], None]) -> None:
        """Have somebody told of bytes as they go over a network."""

    @abstractmethod
    def watch_retries(self, retried: Callable[[str], None]) -> None:
        """Have somebody told, from any thread, why a call over a network is made again."""

    @abstractmethod
    def fence(self) -> Fence:
        """The newest attempt that has begun.

        Raises:
            OSError: storage refused.
        """

    @abstractmethod
    def begin(self, step: int, attempt: int) -> Transaction:
        """Start writing the checkpoint of a step."""

    @abstractmethod
    def describe(self, step: int) -> str:
        """What a checkpoint is called in messages: its path or URL."""

    @abstractmethod
    def directory(self, step: int) -> Path | None:
        """The local directory that holds the checkpoint's files, if there is one."""

    @abstractmethod
    def file(self, manifest: Manifest, name: str) -> Path | RemoteFile:
        """A file of a checkpoint, to be read."""

    @abstractmethod
    def remove(self, step: int) -> None:
        """Delete a checkpoint: manifest first, so that a crash in between leaves nothing that looks whole."""

    @abstractmethod
    def set_aside(self, step: int, label: str = "invalid") -> str:
        """Rename a checkpoint so that nothing resumes from it (`invalid` or `superseded`); returns where it is kept."""

    @abstractmethod
    def set_aside_names(self) -> list[str]:
        """What `set_aside` has kept: proof that this run once had checkpoints."""

    @abstractmethod
    def sweep(self) -> list[str]:
        """Remove what dead writers left half written, none of a newer attempt than ours; returns the names."""

    @abstractmethod
    def read_note(self) -> bytes | None:
        """What a supervisor has written down about the run beside its checkpoints; None where it has not.

        Raises:
            OSError: storage refused.
        """

    def replace_note(self, data: bytes) -> None:
        """Write a note, unless a newer attempt's is there: both are JSON objects with a number `attempt`.

        Raises:
            OSError: storage refused.
        """
        if attempt_of(self.read_note()) <= attempt_of(data):
            self.write_note(data)

    @abstractmethod
    def write_note(self, data: bytes) -> None:
        """Replace the note; a crash leaves the old one or the new one.

        Raises:
            OSError: storage refused.
        """

    @abstractmethod
    def write_record(self, name: str, data: bytes) -> None:
        """Keep a small file of a supervisor's beside the checkpoints, or replace it.

        Args:
            name: letters, digits, dots, dashes and underscores, and no dot in front.

        Raises:
            OSError: storage refused.
        """

    def write_part(self, name: str, path: Path, start: int, end: int) -> None:
        """Keep these bytes of a file as the record of that name.

        Raises:
            OSError: storage refused, or the file cannot be read.
        """
        with path.open("rb") as file:
            file.seek(start)
            self.write_record(name, file.read(end - start))

    @abstractmethod
    def records(self, prefix: str = "") -> dict[str, int]:
        """Names with this prefix that `write_record` has kept something under, in order, and its size in bytes.

        Raises:
            OSError: storage refused.
        """

    @abstractmethod
    def read_record(self, name: str) -> bytes:
        """What was last kept under it; nothing where that has been removed meanwhile.

        Raises:
            OSError: storage refused.
        """

    @abstractmethod
    def _put_fence(self, fence: Fence) -> None:
        """Write it down durably, in place of an older one or one of our own.

        Raises:
            Fenced: somebody else has begun the same attempt.
            OSError: storage refused.
        """

    @abstractmethod
    def _manifest(self, step: int) -> Manifest:
        """As it was written.

        Raises:
            InvalidCheckpoint: there is no whole one.
        """

    @abstractmethod
    def _sizes(self, step: int | None = None) -> dict[str, int]:
        """Size in bytes of every file of one checkpoint, or of all, by its name below the location."""

    @abstractmethod
    def _steps(self, sizes: Mapping[str, int]) -> set[int]:
        """Steps of everything that is named like a checkpoint."""
