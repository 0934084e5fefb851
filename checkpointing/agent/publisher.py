"""Publishes checkpoints at a tier, and removes those that its retention does not keep."""

from __future__ import annotations

import dataclasses
import errno
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from checkpointing.agent.arenas import Arena
from checkpointing.agent.events import (
    CommitFailedEvent,
    Committed,
    FencedEvent,
    NotFiniteKept,
    Pruned,
    PruneFailed,
    SnapshotDamaged,
)
from checkpointing.agent.fencing import Fencer
from checkpointing.agent.reporting import Clock, PortionEnded, Report, SharesWritten, progress_reporter, text_of
from checkpointing.commit.kept import kept_of, remove_unless_kept
from checkpointing.commit.protocol import CommitSteps, StagedFile, commit_snapshot
from checkpointing.commit.reading import pieces_of
from checkpointing.commit.replicated_save import ReplicatedCommit, ReplicatedSave, write_portion
from checkpointing.commit.retention import Retention, steps_to_remove
from checkpointing.commit.sharded_save import ShardedCommit, ShardedSave, write_shards
from checkpointing.commit.tiers import Tiers
from checkpointing.errors import DamagedMemory, Fenced, InvalidCheckpoint
from checkpointing.format.digest import RunningDigest, algorithm_of, digest_buffer
from checkpointing.format.layout import NOT_FINITE_FOLDER
from checkpointing.format.manifest import Manifest, SnapshotInfo
from checkpointing.format.shard_index import HeldFile, ShardParts, parts_name, shard_rank
from checkpointing.storage import Storage, open_storage

Outcome = Committed | CommitFailedEvent
logger = logging.getLogger("checkpointing")
# Saves of several nodes that fail one after the other before an attempt does without.
_MOST_MISSES = 2
# Checkpoints in a row that cannot be removed before the others have to wait for the next time.
_MOST_REFUSALS = 3
# What is read in a fraction of a second.
_SOON_READ_BYTES = 64 << 20
# How many may wait to be removed before commits wait for the reading back.
_MOST_UNPRUNED = 2
# Of how many checkpoints there must be room before one is kept for a post-mortem.
_ROOM = 3
# Tensors that are named where a state is not finite.
_MOST_NAMES = 100


class Publisher:
    """Used by the threads that commit and upload.

    Attributes:
        retention: What the durable tier keeps, as the ranks last said; None until they have.
        is_hurried: The run was asked to stop: nothing that can wait is done.
        has_work: Whether a commit waits for its turn.
    """

    def __init__(
        self,
        tiers: Tiers,
        fencer: Fencer,
        report: Report,
        *,
        local_retention: Retention,
        flush_retries: Callable[[], None] = lambda: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Create a publisher.

        Args:
            tiers: Where.
            fencer: Begins attempts there.
            report: Takes its events.
            local_retention: What the local tier keeps.
            flush_retries: Called at the end of each task, to report calls that were retried.
            clock: Seconds.
        """
        self.retention: Retention | None = None
        self.is_hurried = False
        self.has_work: Callable[[], bool] = bool
        self._tiers, self._fencer, self._report = tiers, fencer, report
        self._local_retention, self._flush_retries, self._clock = local_retention, flush_retries, clock
        self._meetings = _Meetings()
        # By tier: sizes of the checkpoints that could not be removed, by step.
        self._stuck: dict[str, dict[int, int]] = {}
        # Step and attempt of the checkpoints that were read back from the durable tier.
        self._proven: set[tuple[int, int]] = set()

    @property
    def commits(self) -> bool:
        """Whether this node is the one that commits."""
        return self._fencer.commits

    def begin_sharded(self, arena: Arena, save: ShardedSave) -> ShardedCommit:
        """Let the other nodes write their shards of a snapshot that this one commits."""
        assert arena.info is not None

        def prepare() -> None:
            self._fencer.wait_until_answered()
            self._fencer.begin_at_durable_tier()

        is_current = functools.partial(self._is_current, arena.info.attempt)
        commit = ShardedCommit(self._tiers.durable, arena.info, save, prepare=prepare, is_current=is_current)
        commit.begin_now()
        return commit

    def commit(self, arena: Arena, storage: Storage, save: CommitSteps | ReplicatedSave | None = None) -> Outcome:
        """Publish an arena's snapshot, once its attempt has begun. Its digests are awaited file by file.

        Args:
            arena: The snapshot.
            storage: The tier.
            save: The save, where several nodes write; what `begin_sharded` has returned for a share.
        """
        assert arena.info is not None
        self._fencer.wait_until_answered()
        files = [*self._staged_files(arena), *(_staged_parts(shard) for shard in _shards(arena))]
        attempt, held = arena.info.attempt, list[HeldFile]()
        if isinstance(save, ReplicatedSave):
            held = _files_of(arena, save) if self._meetings.are_hopeful(attempt) else []
            save = ReplicatedCommit(save, held, is_current=functools.partial(self._is_current, attempt))
        save = save or CommitSteps()
        outcome = self.publish(
            storage,
            arena.info,
            files,
            sum(size for *_, size in arena.files) - save.others_bytes,
            may_publish=lambda: not (arena.damaged or arena.is_spent),
            at_once=storage.writes_at_once,
            since=arena.whole_since,
            save=save,
        )
        if held:
            self._meetings.add(attempt, save.gave_up is None)
        return outcome

    def _is_current(self, attempt: int) -> bool:
        return self._fencer.current.attempt <= attempt

    def keep_not_finite(self, arena: Arena) -> None:
        """Keep a snapshot that is not finite in a folder of its own at the durable tier, unless one is there already.

        Nothing looks for checkpoints there: it neither counts nor is resumed from.
        """
        assert arena.info is not None
        self._fencer.wait_until_answered()
        info = dataclasses.replace(arena.info, not_finite=arena.not_finite[:_MOST_NAMES])
        try:
            place = open_storage(f"{self._tiers.durable.location.rstrip('/')}/{NOT_FINITE_FOLDER}")
            if place.steps():
                return
            # Not into the folder where a volume was.
            self._fencer.begin_at_durable_tier()
            self._tiers.durable.check_fence(info.step, info.attempt)
            place.begin_attempt(info.attempt)
            place.sweep()
            free, needed = place.free_bytes(), sum(size for *_, size in arena.files)
            if free is not None and free < _ROOM * needed:
                raise OSError(errno.ENOSPC, f"{free:,} bytes are free, and checkpoints need room for {needed:,} each")
            commit_snapshot(place, info, self._staged_files(arena), lambda: not arena.damaged)
        except Exception as error:
            # It is of use to people alone.
            logger.warning(
                "the state of step %d, which is not finite, could not be kept: %s", info.step, text_of(error)
            )
            return
        self._report(
            NotFiniteKept(step=info.step, where=place.describe(info.step), tensors=list(info.not_finite)), None
        )

    def _staged_files(self, arena: Arena) -> list[StagedFile]:
        def digest_of(name: str) -> str:
            # Asked once the file has been written, from the same memory.
            self._check_unchanged(arena, name)
            return arena.digests[name]

        return [
            StagedFile(name, [arena.view(offset, size)], functools.partial(digest_of, name))
            for name, offset, size in arena.files
        ]

    def _check_unchanged(self, arena: Arena, name: str) -> None:
        """Check that a file that has just been written is what was captured.

        Raises:
            DamagedMemory: It is not; the snapshot is not published, nor resumed from.
        """
        arena.digested.wait()
        problem = None if arena.damaged else arena.changed_bytes(name)
        if problem is not None:
            arena.damaged = True
            self._report(SnapshotDamaged(step=arena.step, reason=problem), None)
        if arena.damaged:
            raise DamagedMemory(f"checkpoint-{arena.step} is damaged in memory" if problem is None else problem)

    def _checked(self, arena: Arena, files: Sequence[HeldFile]) -> list[HeldFile]:
        """Return the same files; the digests of their parts, asked for once they are written, are of what they are."""

        def parts(name: str) -> ShardParts:
            self._check_unchanged(arena, name)
            return arena.parts[name]

        return [dataclasses.replace(file, parts=functools.partial(parts, file.name)) for file in files]

    def contribute(
        self, arena: Arena, save: ReplicatedSave | ShardedSave
    ) -> SharesWritten | CommitFailedEvent | PortionEnded:
        """Write this node's part of a snapshot that another node commits."""
        assert arena.info is not None
        if isinstance(save, ReplicatedSave) and not self._meetings.are_hopeful(arena.info.attempt):
            return PortionEnded()
        self._fencer.wait_until_answered()
        try:
            if isinstance(save, ReplicatedSave):
                self._write_portion(arena, arena.info, save)
                return PortionEnded()
            write_shards(self._tiers.durable, arena.info, save, self._checked(arena, _shards(arena)))
            return SharesWritten()
        except Exception as error:
            if isinstance(save, ShardedSave):
                tier = self._tiers.name(self._tiers.durable)
                return CommitFailedEvent(step=arena.step, tier=tier, error=text_of(error))
            # The node that commits does without. Its journal says so; the agent's log has the reason.
            logger.warning("the parts of checkpoint-%d could not be written: %s", arena.step, text_of(error))
            return PortionEnded()
        finally:
            self._flush_retries()

    def _write_portion(self, arena: Arena, info: SnapshotInfo, save: ReplicatedSave) -> None:
        durable, held = self._tiers.durable, _files_of(arena, save)
        own = sum(len(file.part(save.portion(len(file.data)))) for file in held)
        durable.watch(progress_reporter("upload", info.step, own, self._report, self._clock))

        def is_wanted() -> bool:
            return self._is_current(info.attempt) and not self._fencer.commits

        files = self._checked(arena, held)
        self._meetings.add(info.attempt, write_portion(durable, info, save, files, is_wanted))

    def publish(
        self,
        storage: Storage,
        info: SnapshotInfo,
        files: Sequence[StagedFile],
        nbytes: int,
        *,
        may_publish: Callable[[], bool] = lambda: True,
        at_once: int = 1,
        since: float,
        save: CommitSteps | None = None,
    ) -> Outcome:
        """Publish files as a checkpoint.

        Args:
            storage: The tier.
            info: What they are of.
            files: The files.
            nbytes: Their size, to report progress by.
            may_publish: Asked last; False drops what was written.
            at_once: Number of files to write in parallel.
            since: When the work began, by the clock.
            save: Who writes the files; None where this node writes all.

        Returns:
            The event that says what has become of it; the caller reports it.
        """
        began, tier, save = time.process_time(), self._tiers.name(storage), save or CommitSteps()
        storage.watch(progress_reporter("upload", info.step, nbytes, self._report, self._clock))
        try:
            if storage is self._tiers.durable:
                self._fencer.begin_at_durable_tier()
            manifest = commit_snapshot(storage, info, files, may_publish, at_once=at_once, save=save)
        except Exception as error:
            # Also where the commit was not reached.
            save.abandon()
            # Whatever went wrong, the run must learn of it, and the arena must become free again.
            if isinstance(error, Fenced):
                self._report(FencedEvent(reason=str(error)), None)
            return CommitFailedEvent(step=info.step, tier=tier, error=text_of(error))
        finally:
            self._flush_retries()
        return Committed(
            step=info.step,
            tier=tier,
            nbytes=manifest.total_bytes,
            duration_s=round(self._clock() - since, 4),
            cpu_s=round(time.process_time() - began, 4),
            snapshot_attempt=info.attempt,
            nodes=save.nodes_that_write if save.nodes_that_write > 1 else None,
            alone=save.gave_up,
        )

    def prune(self, storage: Storage, spared: Callable[[], Collection[int]] = tuple) -> None:
        """Remove the checkpoints of a tier that its retention does not keep.

        Args:
            storage: The tier.
            spared: Steps that stay all the same; asked only if something is to be removed.
        """
        tier = self._tiers.name(storage)
        retention = self.retention if storage is self._tiers.durable else self._local_retention
        if retention is None:
            return
        stuck = self._stuck.setdefault(tier, {})
        try:
            committed = committed_at(storage)
            by_step = {manifest.step: manifest for manifest in committed}
            doomed = set(steps_to_remove(committed, retention, lambda: kept_of(storage, committed)))
            doomed -= set(spared()) if doomed else set()
            kept = [one for one in committed if one.step not in doomed]
            if doomed and not self._is_proven(storage, kept, len(doomed)):
                return
        except Exception as error:
            self._report(PruneFailed(tier=tier, error=text_of(error)), None)
            return
        failures = 0
        # Those that could not be removed before come last: others must not wait for them.
        for step in sorted(doomed, key=lambda step: (step in stuck, step)):
            try:
                is_removed = remove_unless_kept(storage, by_step[step])
            except Exception as error:
                is_new, failures = step not in stuck, failures + 1
                stuck[step] = by_step[step].total_bytes
                if is_new:
                    held = sum(stuck.values())
                    self._report(
                        PruneFailed(tier=tier, error=text_of(error), steps=sorted(stuck), held_bytes=held), None
                    )
                if failures == _MOST_REFUSALS:
                    # The place does not answer, most likely, and each call may take a minute to say so.
                    return
            else:
                failures = 0
                stuck.pop(step, None)
                if is_removed:
                    self._report(Pruned(step=step, tier=tier), None)

    def _is_proven(self, storage: Storage, kept: Sequence[Manifest], num_doomed: int) -> bool:
        """Return whether one of the checkpoints that stay is known to be what was written, as the storage has it.

        A disk may hold other bytes than it was given, and say nothing. Of those that stay, one is read back: the
        newest, unless another one was before, and none where the run was asked to stop, which must not take as long.

        Raises:
            OSError: It is not what was written, or cannot be read.
        """
        if storage is not self._tiers.durable or storage.checks_arrival:
            return True
        self._proven &= {(one.step, one.attempt) for one in kept}
        if self._proven or not kept:
            return True
        newest = max(kept, key=lambda one: one.step)
        if not self._read_back(storage, newest, is_pressing=num_doomed > _MOST_UNPRUNED):
            return False
        self._proven.add((newest.step, newest.attempt))
        return True

    def _read_back(self, storage: Storage, manifest: Manifest, *, is_pressing: bool) -> bool:
        """Read a checkpoint past caches; return False where that was given up, as something else has to be done.

        Args:
            storage: Where it is.
            manifest: Its manifest.
            is_pressing: Whether so much waits to be removed that commits have to wait, too.
        """
        is_small = manifest.total_bytes <= _SOON_READ_BYTES

        def is_given_up() -> bool:
            return not is_small and (self.is_hurried or (self.has_work() and not is_pressing))

        if is_given_up():
            return False
        storage.refresh(manifest.step)
        found = storage.read_manifest(manifest.step)
        for file in found.files:
            digest = RunningDigest(algorithm_of(file.digest))
            for piece in pieces_of(storage.file(found, file.name)):
                if is_given_up():
                    return False
                digest.update(piece)
            if digest.result() != file.digest:
                raise InvalidCheckpoint(storage.describe(manifest.step), f"{file.name} reads back with another digest")
        return True


class _Meetings:
    """Whether the nodes meet in the storage, which may be a directory that each has for itself, or slow for one."""

    def __init__(self) -> None:
        self._attempt, self._misses = -1, 0

    def add(self, attempt: int, met: bool) -> None:
        """Note a save of several nodes."""
        if attempt != self._attempt:
            self._attempt, self._misses = attempt, 0
        self._misses = 0 if met else self._misses + 1

    def are_hopeful(self, attempt: int) -> bool:
        """Return whether to try it again in this attempt."""
        return attempt != self._attempt or self._misses < _MOST_MISSES


def _shards(arena: Arena) -> list[HeldFile]:
    """Return the shards in an arena."""
    return [
        HeldFile(name, arena.view(offset, size), functools.partial(_parts_of, arena, name))
        for name, offset, size in arena.files
        if shard_rank(name) is not None
    ]


def _files_of(arena: Arena, save: ReplicatedSave) -> list[HeldFile]:
    """Return the files in an arena that several nodes write."""
    return [
        HeldFile(name, arena.view(offset, size), functools.partial(_parts_of, arena, name))
        for name, offset, size in arena.files
        if name in save.files
    ]


def _parts_of(arena: Arena, name: str) -> ShardParts:
    arena.digested.wait()
    return arena.parts[name]


def _staged_parts(shard: HeldFile) -> StagedFile:
    """Return the file with the digests of a shard's parts, made when it is written."""

    @functools.cache
    def data() -> bytes:
        return shard.parts().to_json()

    def pieces() -> Iterator[memoryview]:
        yield memoryview(data())

    return StagedFile(parts_name(shard.name), pieces(), lambda: digest_buffer(data()))


def committed_at(storage: Storage) -> list[Manifest]:
    """Return the manifests of the checkpoints that count at a storage, newest first.

    Raises:
        OSError: Storage refused.
    """
    return [found for _, found in storage.survey() if isinstance(found, Manifest) and not found.not_finite]
