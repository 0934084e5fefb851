"""Copies checkpoints from the local tier to the durable one, the newest first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path

from checkpointing.agent.arenas import Arena
from checkpointing.agent.events import CheckpointQuarantined, CommitFailedEvent, Committed
from checkpointing.agent.publisher import Outcome, Publisher, committed_at
from checkpointing.agent.reporting import Clock, Report, UploadEnded, text_of
from checkpointing.agent.tasks import TaskThread, one_by_one
from checkpointing.commit.catalog import verify
from checkpointing.commit.kept import kept_of
from checkpointing.commit.protocol import StagedFile
from checkpointing.commit.retention import Retention, steps_to_upload
from checkpointing.commit.tiers import Tiers
from checkpointing.errors import InvalidCheckpoint
from checkpointing.format.digest import RunningDigest, algorithm_of, digesting
from checkpointing.format.manifest import FileEntry, Manifest
from checkpointing.storage import Storage

# As large as the parts of an upload, so that none is put together from several.
_PIECE_BYTES = 32 * 1024 * 1024


class _Look(Enum):
    LOOK = "look"


class Uploader:
    """Uploads what is due, and the snapshots that the local tier refused.

    Attributes:
        thread: Handles its tasks.
    """

    def __init__(
        self,
        tiers: Tiers,
        publisher: Publisher,
        report: Report,
        *,
        flush_retries: Callable[[], None] = lambda: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Create an uploader.

        Args:
            tiers: Where. Without a local tier nothing is ever due.
            publisher: Publishes at the durable tier.
            report: Takes its events.
            flush_retries: Called at the end of each task, to report calls that were retried.
            clock: Seconds.
        """
        self._tiers, self._publisher, self._report = tiers, publisher, report
        self._flush_retries, self._clock = flush_retries, clock
        # The checkpoints of the durable tier; None where they have to be listed.
        self._on_durable: dict[int, Manifest] | None = None
        self._lock = threading.Lock()
        self._num_tasks = 0
        self._look_waits = False
        self.thread: TaskThread[Arena | _Look] = TaskThread("checkpoint-upload", one_by_one(self._handle))

    @property
    def _is_needed(self) -> bool:
        return self._publisher.commits and self._tiers.local is not None

    @property
    def is_busy(self) -> bool:
        """Whether a task is waiting or being handled."""
        return self._num_tasks > 0

    def look(self) -> None:
        """Upload what is due, later; nothing new where that is already waiting."""
        if not self._is_needed:
            return
        with self._lock:
            if self._look_waits:
                return
            self._look_waits = True
        self._put(_Look.LOOK)

    def upload_arena(self, arena: Arena) -> None:
        """Publish a snapshot at the durable tier from memory, later: the local tier refused it."""
        self._put(arena)

    def due(self) -> list[int]:
        """Return the steps that the durable tier should get, in order; by what was last known of it.

        Raises:
            OSError: The local tier refused.
        """
        if self._tiers.local is None:
            return []
        on_durable = (self._on_durable or {}).values()
        retention = self._publisher.retention or Retention()
        committed = committed_at(self._tiers.local)
        return steps_to_upload(committed, on_durable, retention, kept_of(self._tiers.local, committed))

    def _put(self, task: Arena | _Look) -> None:
        with self._lock:
            self._num_tasks += 1
        self.thread.put(task)

    def _handle(self, task: Arena | _Look) -> None:
        durable = self._tiers.durable
        if isinstance(task, _Look):
            self._look_waits = False
            self._upload_due()
        else:
            outcome = self._publisher.commit(task, durable)
            self._report(outcome, task)
            self._on_durable = None
            if isinstance(outcome, Committed):
                self._publisher.prune(durable)
        self._flush_retries()
        with self._lock:
            self._num_tasks -= 1
        self._report(UploadEnded(), None)

    def _upload_due(self) -> None:
        durable, local, step = self._tiers.durable, self._tiers.local, -1
        assert local is not None
        try:
            step = max(self.due(), default=-1)
            if step < 0:
                return
            if self._on_durable is None:
                self._on_durable = {manifest.step: manifest for manifest in committed_at(durable)}
            # Asked again after each: a newer one may have been committed meanwhile.
            while due := self.due():
                outcome, manifest = self._upload(local, due[0])
                self._report(outcome, None)
                if isinstance(outcome, CommitFailedEvent) or manifest is None:
                    self._on_durable = None
                    return
                self._on_durable[manifest.step] = manifest
            self._publisher.prune(durable)
        except Exception as error:
            self._report(CommitFailedEvent(step=step, tier=self._tiers.name(durable), error=text_of(error)), None)

    def _upload(self, local: Storage, step: int) -> tuple[Outcome, Manifest | None]:
        """Copy a checkpoint; its digests are compared on the way, and one that is damaged is quarantined."""
        durable, since = self._tiers.durable, self._clock()
        try:
            manifest = local.read_manifest(step)
        except InvalidCheckpoint as error:
            return CommitFailedEvent(step=step, tier=self._tiers.name(durable), error=str(error)), None
        copy = _CheckedCopy(local, manifest)
        outcome = self._publisher.publish(durable, manifest.info, copy.files, manifest.total_bytes, since=since)
        if isinstance(outcome, CommitFailedEvent) and copy.problem is not None:
            self._quarantine_if_damaged(local, step)
        return outcome, manifest

    def _quarantine_if_damaged(self, local: Storage, step: int) -> None:
        """Read a checkpoint once more, past the page cache, before it counts as damaged."""
        local.refresh(step)
        try:
            verify(local, step)
        except InvalidCheckpoint as error:
            kept = local.quarantine(step)
            self._report(CheckpointQuarantined(step=step, reason=str(error), kept_as=kept), None)


class _CheckedCopy:
    """The files of a local checkpoint, whose digests are compared while they are read.

    Attributes:
        files: What to publish.
        problem: What is wrong with the checkpoint, once that was found.
    """

    def __init__(self, local: Storage, manifest: Manifest) -> None:
        self.problem: InvalidCheckpoint | None = None
        self._place = local.describe(manifest.step)
        folder = local.directory(manifest.step)
        assert folder is not None
        self.files = [self._staged(folder, file) for file in manifest.files]

    def _staged(self, folder: Path, file: FileEntry) -> StagedFile:
        digest = RunningDigest(algorithm_of(file.digest))

        def compared() -> str:
            if digest.result() != file.digest:
                self.problem = InvalidCheckpoint(self._place, f"{file.name} was altered: its digest differs")
                raise self.problem
            return file.digest

        return StagedFile(file.name, digesting(_read(folder / file.name), digest), compared, file.size)


def _read(path: Path) -> Iterator[memoryview]:
    """Yield a file's bytes. The file is not mapped: a failing disk would kill this process."""
    try:
        with path.open("rb", buffering=0) as file:
            while data := file.read(_PIECE_BYTES):
                yield memoryview(data)
    except OSError as error:
        raise InvalidCheckpoint(str(path.parent), f"{path.name} cannot be read ({error.strerror})") from None
