"""The checkpoint seam: what the commit protocol asks of a place that keeps checkpoints."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from checkpointing.errors import CommitConflict, ForeignCheckpoint, InvalidCheckpoint, StaleCheckpoint
from checkpointing.format.manifest import MANIFEST_NAME, Manifest
from checkpointing.host.failpoints import failpoint
from checkpointing.storage.fence import Claim, Fence
from checkpointing.storage.object_store import ObjectStore
from checkpointing.storage.rates import Rates
from checkpointing.storage.sidecars import Sidecars

CHECKPOINT_PREFIX = "checkpoint-"
# A step or an attempt in a name, as it is written here: not 007, nor another script's digits, which int() would take.
NUMBER = r"(?:0|[1-9][0-9]{0,17})"
# In place of a size, where a file should be: a symbolic link, a pipe, a device.
IRREGULAR = -1


class Transaction(Protocol):
    """One checkpoint in the making. Nothing of it is visible as a checkpoint before `commit` returns.

    Every call raises OSError where the storage refuses it (full, read-only, failing), unless it says otherwise.
    """

    def write(self, name: str, pieces: Iterable[memoryview], nbytes: int | None = None) -> int:
        """Store one file durably.

        Args:
            name: Name of the file inside the checkpoint.
            pieces: Its bytes, in order. A piece may be overwritten when the next is asked for, unless they are a
                sequence.
            nbytes: The file's size, where the pieces do not tell it and it is known.

        Returns:
            The file's size in bytes.
        """

    def written(self) -> dict[str, int]:
        """Return the size in bytes of each whole file that is stored already, by name, where the save `continues`."""

    def commit(self, manifest: Manifest) -> None:
        """Publish. When this returns, the checkpoint survives a power cut.

        Raises:
            OSError: Storage refused it; nothing is published.
            CommitConflict: The step is already committed.
            Fenced: A newer attempt has begun.
        """

    def abort(self) -> None:
        """Remove what was written, by whatever node. Safe after any failure, and after `commit`."""

    def write_note(self, name: str, data: bytes) -> None:
        """Store a small file durably, in place of one of that name: readers see one of the two, whole."""

    def read_note(self, name: str) -> bytes | None:
        """Return a note that this or another node has written; None if there is none."""

    def withdraw(self, names: Sequence[str]) -> None:
        """Remove files and notes of these names, where there are any; failures are left to the next sweep."""

    def open_split(self, name: str, nbytes: int) -> str:
        """Begin a file of `nbytes` bytes that several nodes write, where the storage `can_split`.

        Returns:
            What all of them need to write to it. Once it is dropped or closed, nothing written with it counts.
        """

    def write_parts(self, name: str, token: str, first: int, data: memoryview) -> list[Any]:
        """Store some parts of such a file durably; any node may.

        Args:
            name: Name of the file inside the checkpoint.
            token: From `open_split`.
            first: Number of the first part; each but the file's last has `PART_BYTES` bytes.
            data: The bytes of all of them.

        Returns:
            Receipts for `close_split`, as JSON values.

        Raises:
            OSError: Also if the file was dropped.
        """

    def close_split(self, name: str, token: str, data: memoryview, receipts: Sequence[Any]) -> None:
        """Complete such a file.

        Args:
            name: Name of the file inside the checkpoint.
            token: From `open_split`.
            data: All of its bytes; a place that gives no receipts is compared with them, here and there.
            receipts: Of all its parts, in order.

        Raises:
            OSError: Also if parts are not there; the file can only be dropped then.
        """

    def drop_split(self, name: str, token: str) -> None:
        """Give such a file up; its name can be written in another way. Failures are left to the next sweep."""


class RemoteFile(Protocol):
    """A file that is not on this machine, read by ranges."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` from `start` on; raises OSError where it cannot be read."""


class Storage(ABC):
    """A place that keeps checkpoints. Every call that reaches it may raise OSError.

    Attributes:
        location: Path or URL that names it.
        root: Directory of this machine that holds everything, where there is one: its files can be renamed, locked.
        store: The object store that holds everything, where there is one.
        sidecars: Small files kept with the checkpoints.
        writes_at_once: How many files are best written in parallel.
        can_split: Whether several nodes can write one file.
        checks_arrival: Whether the place compares what it stores with a checksum of the writer's. Where it does not,
            what was written is read back before older checkpoints are removed for it.
    """

    location: str
    root: Path | None = None
    store: ObjectStore | None = None
    sidecars: Sidecars
    writes_at_once = 1
    can_split = False
    checks_arrival = False

    def __init__(self, location: str) -> None:
        self.location = location
        self._claim = Claim(location)

    # -- attempts ------------------------------------------------------------------------------------------------

    def begin_attempt(self, attempt: int, held: Iterable[tuple[int, int]] = ()) -> None:
        """Fence all older attempts: nothing that they publish from now on is ever loaded.

        Args:
            attempt: Number of the attempt.
            held: Step and attempt of what the caller itself has yet to publish of older attempts.

        Raises:
            Fenced: This attempt or a newer one has begun already.
        """
        held = frozenset(held)
        fence = self.fence()
        opened = self._claim.opened(fence, attempt, held)
        if opened is not fence:
            self._put_fence(opened)
            failpoint("fence.opened")
        if opened.oldest < attempt:
            # What has counted once still counts, so that what was quarantined can be repaired and put back.
            self._put_fence(self._claim.completed(self.counting() | held))
            failpoint("fence.published")

    @abstractmethod
    def watch_location(self) -> None:
        """Have a location that is removed while an attempt runs made again, where there are directories.

        This process then keeps the directory's volume from being unmounted.
        """

    def has_begun(self, attempt: int) -> bool:
        """Return whether this process has begun an attempt here."""
        return self._claim.attempt == attempt

    def check_fence(self, step: int, attempt: int) -> None:
        """Check that a checkpoint of this step and attempt will count.

        Raises:
            Fenced: It will not, or that is not known.
        """
        self._claim.check(self.fence(), step, attempt)

    @abstractmethod
    def fence(self) -> Fence:
        """Return the fence of the newest attempt that has begun."""

    def counting(self) -> frozenset[tuple[int, int]]:
        """Return step and attempt of every checkpoint that counts, damaged or not."""
        fence = self.fence()
        return fence.accepted | {(m.step, m.attempt) for m in self._published() if fence.admits(m)}

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(
        self, step: int, attempt: int, identity: str = "", *, joins: bool = False, continues: bool = False
    ) -> Transaction:
        """Start writing the checkpoint of a step.

        Args:
            step: The step.
            attempt: The attempt that computed it.
            identity: Identity of the save, in hexadecimal digits, where several nodes write it: all begin with the
                same one, and one of them commits or aborts.
            joins: This node does neither: nothing is made for it.
            continues: What an earlier process has written whole under this identity stays, and each file appears whole
                or not at all.
        """

    def displace_stale(self, step: int, attempt: int) -> None:
        """Quarantine what holds a checkpoint's place but does not count: an older attempt published it too late.

        Raises:
            Fenced: A newer attempt has begun.
            CommitConflict: It was not written by this library.
        """
        try:
            self.read_manifest(step)
        except ForeignCheckpoint:
            raise CommitConflict(
                f"{self.describe(step)} was not written by this library and is kept: this copy is dropped. Train in "
                "another output_dir, or move it away"
            ) from None
        except InvalidCheckpoint as error:
            is_whole = not isinstance(error, StaleCheckpoint) and self._is_whole_after_all(step)
            # Its writer may have displaced a stale one itself, and have published since.
            self.check_fence(step, attempt)
            if not is_whole:
                self.quarantine(step)

    def _is_whole_after_all(self, step: int) -> bool:
        """Return whether a checkpoint that was read wrongly is whole when it is read once more, past caches."""
        self.refresh(step)
        try:
            self.read_manifest(step)
        except InvalidCheckpoint:
            return False
        return True

    def read_manifest(self, step: int) -> Manifest:
        """Return the manifest of a step, its files checked for presence and size, not for content.

        Raises:
            InvalidCheckpoint: There is no whole manifest, or a file is missing or of another size.
        """
        return self._checked(step, self.fence(), self._sizes(step))

    def keeps(self, manifest: Manifest) -> bool:
        """Return whether this very checkpoint is here and durable: an earlier try has published it without noticing."""
        try:
            kept = self.read_manifest(manifest.step)
        except InvalidCheckpoint:
            return False
        return (kept.info, kept.files) == (manifest.info, manifest.files)

    def survey(self) -> Iterator[tuple[int, Manifest | InvalidCheckpoint]]:
        """Yield everything that is named like a checkpoint, newest first: its manifest, or why it does not count."""
        # In this order: what a newer attempt publishes meanwhile counts.
        fence, sizes = self.fence(), self._sizes()
        for step in sorted(self._steps(sizes), reverse=True):
            try:
                yield step, self._checked(step, fence, sizes)
            except InvalidCheckpoint as error:
                yield step, error

    def steps(self) -> list[int]:
        """Return the steps of everything that is named like a checkpoint, valid or not, ascending."""
        return sorted(self._steps(self._sizes()))

    @abstractmethod
    def has_step(self, step: int) -> bool:
        """Return whether something is named like this step's checkpoint, valid or not; looks at no other."""

    def foreign_steps(self) -> list[int]:
        """Return the steps of what is named like a checkpoint, but was not written by this library."""
        return [step for step, found in self.survey() if isinstance(found, ForeignCheckpoint)]

    @abstractmethod
    def describe(self, step: int) -> str:
        """Return what a checkpoint is called in messages: its path or URL."""

    @abstractmethod
    def directory(self, step: int) -> Path | None:
        """Return the local directory that holds the checkpoint's files, if there is one."""

    @abstractmethod
    def file(self, manifest: Manifest, name: str) -> Path | RemoteFile:
        """Return a file of a checkpoint, to be read."""

    def refresh(self, step: int) -> None:  # noqa: B027 - by default each read asks the place
        """Have the next read of a checkpoint come from where it is kept: past caches, over new connections."""

    @abstractmethod
    def remove(self, step: int) -> None:
        """Delete a checkpoint: manifest first, so that a crash in between leaves nothing that looks whole."""

    @abstractmethod
    def quarantine(self, step: int, label: str = "invalid") -> str:
        """Rename a checkpoint so that nothing resumes from it (`invalid` or `superseded`); return where it is kept."""

    @abstractmethod
    def quarantined(self) -> list[str]:
        """Return the names of what `quarantine` has kept: proof that this run once had checkpoints."""

    @abstractmethod
    def take_back(self, name: str) -> int | None:
        """Give one of `quarantined` its place back; return its step, or None where that place is taken."""

    @abstractmethod
    def sweep(self) -> list[str]:
        """Remove what dead writers left half written, none of a newer attempt than ours; return the names."""

    # -- the place itself ----------------------------------------------------------------------------------------

    @abstractmethod
    def probe(self) -> str | None:
        """Try what a commit does here, with a small file that is removed again.

        What an earlier trial has left that was killed is removed, too.

        Returns:
            What the user should know about the place; None for nothing.
        """

    @property
    def decides_between_writers(self) -> bool:
        """Whether the place itself lets only one of two writers publish at the same moment."""
        return True

    def free_bytes(self) -> int | None:
        """Return how much more can be stored; None where no limit is known."""
        return None

    @abstractmethod
    def measure(self, checkpoint_bytes: int) -> Rates | None:
        """Measure how fast checkpoints of this size are written and read; None where there is no room to try."""

    @abstractmethod
    def remove_all(self) -> None:
        """Remove everything that is kept at this location."""

    def watch(self, transferred: Callable[[int], None]) -> None:  # noqa: B027 - by default there is no network
        """Call `transferred` with a number of bytes whenever that many have gone over a network."""

    def watch_retries(self, retried: Callable[[str], None]) -> None:  # noqa: B027
        """Call `retried`, from any thread, with the reason whenever a call over a network is retried."""

    # -- what a back end gives besides ---------------------------------------------------------------------------

    def _checked(self, step: int, fence: Fence, sizes: Mapping[str, int]) -> Manifest:
        place = self.describe(step)
        try:
            manifest = self._manifest(step)
        except ForeignCheckpoint:
            raise
        except InvalidCheckpoint:
            own = f"{CHECKPOINT_PREFIX}{step}/"
            if self._are_foreign([name.removeprefix(own) for name in sizes if name.startswith(own)]):
                raise ForeignCheckpoint(place, f"it has no {MANIFEST_NAME}: this library has not written it") from None
            raise
        if manifest.step == step and not fence.admits(manifest):
            raise StaleCheckpoint(place, f"attempt {manifest.attempt} published it after a newer one had begun")
        problem = _problem(manifest, step, sizes)
        if problem is not None:
            raise InvalidCheckpoint(place, problem)
        return manifest

    def _published(self) -> Iterator[Manifest]:
        for step in self.steps():
            with contextlib.suppress(InvalidCheckpoint):
                yield self._manifest(step)

    def _are_foreign(self, names: Sequence[str]) -> bool:
        """Return whether files of these names, without a readable manifest, are another program's checkpoint."""
        return False

    @abstractmethod
    def _put_fence(self, fence: Fence) -> None:
        """Write a fence durably, in place of an older one or one of our own.

        Raises:
            Fenced: Another process has begun the same attempt.
        """

    @abstractmethod
    def _manifest(self, step: int) -> Manifest:
        """Return a manifest as it was written.

        Raises:
            InvalidCheckpoint: There is no whole one.
        """

    @abstractmethod
    def _sizes(self, step: int | None = None) -> dict[str, int]:
        """Return the size in bytes of every file of one checkpoint, or of all, by its name below the location."""

    @abstractmethod
    def _steps(self, sizes: Mapping[str, int]) -> set[int]:
        """Return the steps of everything that is named like a checkpoint."""


def _problem(manifest: Manifest, step: int, sizes: Mapping[str, int]) -> str | None:
    """Return why a manifest that was found at a step does not count; None where it does."""
    if manifest.step != step:
        return f"{MANIFEST_NAME} is of step {manifest.step}"
    folder = manifest.folder or f"{CHECKPOINT_PREFIX}{step}"
    for file in manifest.files:
        size = sizes.get(f"{folder}/{file.name}")
        if size is None:
            return f"{file.name} cannot be read (it is missing)"
        if size == IRREGULAR:
            return f"{file.name} is not a regular file of its folder (a link, a pipe)"
        if size != file.size:
            return f"{file.name} has {size} bytes, the manifest says {file.size}"
    return None
