"""Everything of the agent that touches the storage of one stage, in threads of its own.

With a local tier a snapshot is committed there, and copied to the durable tier from those files, so that its arena is
free again; if the local tier refuses it, the durable tier gets it from the arena.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum

from checkpointing.agent.arenas import Arena
from checkpointing.agent.events import CommitFailedEvent, Fetched, FetchFailed, SnapshotDropped
from checkpointing.agent.fencing import Fencer, Fencing
from checkpointing.agent.publisher import Publisher
from checkpointing.agent.reporting import (
    Clock,
    Digested,
    FenceAnswered,
    PortionEnded,
    Report,
    RetryCounter,
    progress_reporter,
    text_of,
)
from checkpointing.agent.tasks import SidecarWriter, TaskThread, one_by_one
from checkpointing.agent.uploader import Uploader
from checkpointing.commit.catalog import CatalogEntry
from checkpointing.commit.reading import pieces_of
from checkpointing.commit.replicated_save import ReplicatedSave
from checkpointing.commit.retention import Retention
from checkpointing.commit.sharded_save import ShardedCommit, ShardedSave
from checkpointing.commit.tiers import Tiers
from checkpointing.errors import InvalidCheckpoint
from checkpointing.format.digest import RunningDigest, algorithm_of
from checkpointing.format.manifest import FileEntry

# Starts a call in a thread of that name.
Spawn = Callable[[Callable[[], None], str], object]


def start_thread(call: Callable[[], None], name: str) -> None:
    """Make a call in a daemon thread of that name."""
    threading.Thread(target=call, name=name, daemon=True).start()


class _Prune(Enum):
    PRUNE = "prune"


@dataclass(frozen=True)
class _Commit:
    """A snapshot to commit, and the save where several nodes write."""

    arena: Arena
    save: ShardedCommit | ReplicatedSave | None


@dataclass(frozen=True)
class _Contribution:
    """A snapshot that another node commits, and of which this one writes a part."""

    arena: Arena
    save: ShardedSave | ReplicatedSave


@dataclass(frozen=True)
class _PostMortem:
    """A snapshot that is not finite, to be kept for a post-mortem."""

    arena: Arena


_Task = _Commit | _Contribution | _PostMortem | _Prune


class Writer:
    """Methods are called by the agent's main thread; results are reported from other threads.

    Attributes:
        fencer: Begins attempts.
        publisher: Commits and prunes.
        uploader: Copies checkpoints to the durable tier.
        sidecars: Writes what is kept with the checkpoints.
    """

    def __init__(
        self,
        tiers: Tiers,
        report: Report,
        *,
        commits: bool,
        local_retention: Retention,
        clock: Clock = time.monotonic,
        spawn: Spawn = start_thread,
    ) -> None:
        """Create a worker; its threads do not run yet.

        Args:
            tiers: The stage's tiers.
            report: Takes results, from any thread.
            commits: Whether this node's agent is the one that commits.
            local_retention: What the local tier keeps.
            clock: Seconds.
            spawn: Starts a thread for a call that is made once.
        """
        self._tiers, self._report = tiers, report
        self._clock, self._spawn = clock, spawn
        self._retries = [RetryCounter(tiers.name(storage), report, clock) for storage in tiers.nearest_first]
        for storage, counter in zip(tiers.nearest_first, self._retries, strict=True):
            storage.watch_retries(counter.add)
        self.fencer = Fencer(tiers, report, commits=commits)
        self.publisher = Publisher(
            tiers,
            self.fencer,
            report,
            local_retention=local_retention,
            flush_retries=self._flush_retries,
            clock=clock,
        )
        self.uploader = Uploader(tiers, self.publisher, report, flush_retries=self._flush_retries, clock=clock)
        durable = tiers.durable
        self.sidecars = SidecarWriter(durable.sidecars, tiers.name(durable), report, self._flush_retries)
        self._digesting: TaskThread[Arena] = TaskThread("checkpoint-digest", one_by_one(self._digest))
        self._committing: TaskThread[_Task] = TaskThread("checkpoint-commit", one_by_one(self._commit))
        self.publisher.has_work = lambda: self._committing.has_waiting
        self._threads = (self._digesting, self._committing, self.uploader.thread, self.sidecars.thread)

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads, after all that was handed over."""
        for thread in self._threads:
            thread.close()

    def run_pending(self) -> None:
        """Handle what was handed over in the calling thread, instead of `start`."""
        for thread in self._threads:
            thread.run_pending()

    @property
    def is_uploading(self) -> bool:
        """Whether something is, or is about to be, on its way to the durable tier."""
        return self.uploader.is_busy

    def set_retention(self, retention: Retention) -> None:
        """Take in what the durable tier is to keep."""
        self.publisher.retention = retention

    def begin_attempt(self, attempt: int, held: Iterable[tuple[int, int]]) -> Fencing:
        """Shut out writers of older attempts, on any machine; then look up what there is to resume from.

        Args:
            attempt: Number of the attempt.
            held: Step and attempt of snapshots of older attempts that are yet to be committed.

        Returns:
            What becomes of it; `FenceAnswered` is reported when it is over.
        """
        fencing = self.fencer.begin(attempt, held)
        self._spawn(lambda: self._begin(fencing), "checkpoint-fence")
        return fencing

    def digest(self, arena: Arena) -> None:
        """Compute a snapshot's digests; reports `Digested`."""
        self._digesting.put(arena)

    def commit(self, arena: Arena, save: ShardedSave | ReplicatedSave | None = None) -> None:
        """Commit a snapshot; reports `Committed` or `CommitFailedEvent`.

        Where another node commits it, this one's part is written: of shards, that reports `SharesWritten` or
        `CommitFailedEvent`; of files that all nodes hold, `PortionEnded`.

        Args:
            arena: The snapshot.
            save: The save, where several nodes write.
        """
        if save is not None and not arena.publishes:
            self._committing.put(_Contribution(arena, save))
        elif isinstance(save, ShardedSave):
            # Before its turn comes: the other nodes write meanwhile, and wait for no more than this.
            self._committing.put(_Commit(arena, self.publisher.begin_sharded(arena, save)))
        else:
            self._committing.put(_Commit(arena, save))

    def keep_not_finite(self, arena: Arena) -> None:
        """Keep a snapshot that is not finite for a post-mortem, if it is the first; reports `PortionEnded`."""
        self._committing.put(_PostMortem(arena))

    def prune(self) -> None:
        """Remove what retention does not keep, and upload what is due: a rank has committed by itself."""
        self._committing.put(_Prune.PRUNE)

    def upload_due(self) -> None:
        """Upload what is due."""
        self.uploader.look()

    def keep(self, name: str, data: bytes) -> None:
        """Keep a sidecar of the agent's own, if this node writes."""
        if self.fencer.commits:
            self.sidecars.write(name, data)

    def fetch(self, entry: CatalogEntry, arena: Arena) -> None:
        """Read a checkpoint into an arena; reports `Fetched` or `FetchFailed`."""
        tier = self._tiers.name(entry.storage)
        self._spawn(lambda: fetch(entry, arena, tier, self._report, self._clock), "checkpoint-fetch")

    def _begin(self, fencing: Fencing) -> None:
        self.fencer.run(fencing)
        self._flush_retries()
        fencing.answered.set()
        self._report(FenceAnswered(), None)
        self.upload_due()

    def _digest(self, arena: Arena) -> None:
        problem = arena.digest()
        if problem is not None:
            arena.damaged = True
            self._report(SnapshotDropped(step=arena.step, reason=problem), None)
        arena.digested.set()
        self._report(Digested(), arena)

    def _commit(self, task: _Task) -> None:
        if isinstance(task, _PostMortem):
            self.publisher.keep_not_finite(task.arena)
            self._report(PortionEnded(), task.arena)
            return
        storage = self._tiers.first
        # Of files that all nodes hold. Only the durable tier is one that all can write to.
        can_split = self._tiers.local is None and storage.can_split
        if isinstance(task, _Contribution):
            is_wanted = can_split or isinstance(task.save, ShardedSave)
            self._report(self.publisher.contribute(task.arena, task.save) if is_wanted else PortionEnded(), task.arena)
            return
        if isinstance(task, _Commit):
            arena, save = task.arena, task.save
            if isinstance(save, ShardedCommit):
                storage = self._tiers.durable
            elif not can_split:
                save = None
            outcome = self.publisher.commit(arena, storage, save)
            if isinstance(outcome, CommitFailedEvent) and storage is self._tiers.local and not arena.damaged:
                # The arena is still needed: the durable tier gets the snapshot.
                self._report(outcome, None)
                self.uploader.upload_arena(arena)
                return
            self._report(outcome, arena)
            if isinstance(outcome, CommitFailedEvent):
                return
        self.publisher.prune(storage, self.uploader.due if storage is self._tiers.local else tuple)
        self._flush_retries()
        self.upload_due()

    def _flush_retries(self) -> None:
        for counter in self._retries:
            counter.flush()


_FETCHED_AT_ONCE = 2


def fetch(entry: CatalogEntry, arena: Arena, tier: str, report: Report, clock: Clock = time.monotonic) -> None:
    """Read a checkpoint's files into an arena, and compare their digests.

    Args:
        entry: The checkpoint; it has a manifest.
        arena: Where to, its `files` in the order of the manifest's.
        tier: Name of the storage's tier in events.
        report: Takes `Fetched` or `FetchFailed` with the arena, and progress.
        clock: Seconds.
    """
    manifest, storage, since = entry.manifest, entry.storage, clock()
    assert manifest is not None
    storage.watch(progress_reporter("download", entry.step, manifest.total_bytes, report, clock))

    def read(placed: tuple[str, int, int], recorded: FileEntry) -> str:
        name, offset, nbytes = placed
        digest = RunningDigest(algorithm_of(recorded.digest))
        end = offset
        for piece in pieces_of(storage.file(manifest, name)):
            digest.update(piece)
            # Not through the mapping, in which each page would be cleared first, and cost a fault.
            arena.write(end, piece)
            end += len(piece)
        if end != offset + nbytes:
            raise OSError(0, f"it has {end - offset} bytes, not {nbytes}")
        return digest.result()

    try:
        with ThreadPoolExecutor(_FETCHED_AT_ONCE, "checkpoint-fetch") as pool:
            digests = list(pool.map(read, arena.files, manifest.files))
        altered = [file.name for file, digest in zip(manifest.files, digests, strict=True) if digest != file.digest]
        if altered:
            raise InvalidCheckpoint(storage.describe(entry.step), f"{altered[0]} was altered: its digest differs")
    except Exception as error:
        # Of any kind, as ranks wait for the report. They will read it themselves, and find what is wrong.
        report(FetchFailed(step=entry.step, error=text_of(error)), arena)
        return
    arena.digests = {file.name: file.digest for file in manifest.files}
    arena.digested.set()
    duration_s, nbytes = round(clock() - since, 4), manifest.total_bytes
    report(Fetched(step=entry.step, tier=tier, nbytes=nbytes, duration_s=duration_s), arena)
