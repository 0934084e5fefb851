"""Everything of the agent that touches storage, in threads of its own: digests, commits, uploads from tier to tier,
fences, retention, and fetching what is resumed from.

With a local tier a snapshot is committed there, and copied to the durable tier from those files, so that its arena is
free again; if the local tier refuses it, the durable tier gets it from the arena.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from checkpointing.agent.arenas import Arena
from checkpointing.agent.results import Digested, FenceAnswered, Report, UploadEnded
from checkpointing.catalog import Catalog, CatalogEntry
from checkpointing.commit import StagedFile, commit_snapshot
from checkpointing.digest import RunningDigest, algorithm_of, digest_buffer, digesting
from checkpointing.errors import CheckpointError, Fenced, InvalidCheckpoint
from checkpointing.events import (
    CheckpointQuarantined,
    CommitFailed,
    Committed,
    Fetched,
    FetchFailed,
    Pruned,
    PruneFailed,
    RestartStateFailed,
    StorageRetried,
    TierUnreachable,
    Transfer,
)
from checkpointing.events import Fenced as FencedEvent
from checkpointing.manifest import FileEntry, Manifest, SnapshotInfo
from checkpointing.reading import read_into
from checkpointing.retention import Retention, steps_to_remove, steps_to_upload
from checkpointing.storage import Storage
from checkpointing.storage.object_store import StorageTimeout
from checkpointing.threads import in_background
from checkpointing.tiers import Tiers

_FETCHED_AT_ONCE = 2
# With checkpoints at hand, an attempt does not wait longer than this for a durable tier that is away.
_PATIENCE_S = 10.0
# As large as an upload's parts, so that none is copied together.
_PIECE_BYTES = 32 * 1024 * 1024
_PROGRESS_INTERVAL_S = 0.5
_RETRIES_INTERVAL_S = 60.0


@dataclass
class Fencing:
    """Shutting out the writers of older attempts, at one attempt's begin.

    Attributes:
        held: step and attempt of snapshots of older attempts that are yet to be committed.
        error: why it failed; this and what follows are to be read once `answered` is set.
        fenced: that was because a newer attempt has begun.
        durable_begun: the durable tier knows of the attempt; without that nothing is published there.
        unreachable: why the durable tier is left out of account at the attempt's begin.
        newest: what the attempt could resume from.
    """

    attempt: int
    held: frozenset[tuple[int, int]] = frozenset()
    answered: threading.Event = field(default_factory=threading.Event)
    error: str | None = None
    fenced: bool = False
    durable_begun: bool = False
    unreachable: str | None = None
    newest: CatalogEntry | None = None


class _Retries:
    """How many calls to a tier were made again, and why: told at once, then now and then, and when a task is over."""

    def __init__(self, tier: str, tell: Report) -> None:
        self._tier, self._tell, self._lock = tier, tell, threading.Lock()
        self._count, self._reason, self._told_at = 0, "", -_RETRIES_INTERVAL_S

    def add(self, reason: str) -> None:
        with self._lock:
            self._count, self._reason = self._count + 1, reason
        if time.monotonic() - self._told_at >= _RETRIES_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        with self._lock:
            if not self._count:
                return
            event = StorageRetried(tier=self._tier, count=self._count, reason=self._reason)
            self._count, self._told_at = 0, time.monotonic()
        self._tell(event, None)


class Writer:
    """Methods are called by the agent's main thread; what comes of it is told through `tell`, from any thread."""

    def __init__(self, tiers: Tiers, tell: Report, *, commits: bool, local_retention: Retention) -> None:
        """`commits`: whether this node's agent is the one that writes."""
        self._tiers, self._tell, self._commits = tiers, tell, commits
        self._retries = {tiers.name(storage): _Retries(tiers.name(storage), tell) for storage in tiers.nearest_first}
        for storage in tiers.nearest_first:
            storage.watch_retries(self._retries[tiers.name(storage)].add)
        self._local_retention = local_retention
        # Of the durable tier; the ranks say which.
        self.retention: Retention | None = None
        self._fencing = Fencing(-1, durable_begun=True)
        self._fencing.answered.set()
        # Attempts may follow each other faster than storage answers.
        self._fence_lock, self._durable_lock = threading.Lock(), threading.Lock()
        self._swept = False
        # What is known to lie in the durable tier; None where that has to be looked up.
        self._on_durable: dict[int, Manifest] | None = None
        self._to_digest: queue.SimpleQueue[Arena | None] = queue.SimpleQueue()
        # An arena to commit; "prune"; or None to end.
        self._to_commit: queue.SimpleQueue[Arena | Literal["prune"] | None] = queue.SimpleQueue()
        # An arena that the local tier has refused; "look" for what is due; or None to end.
        self._to_upload: queue.SimpleQueue[Arena | Literal["look"] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=loop, name=f"checkpoint-{name}", daemon=True)
            for name, loop in (
                ("digest", self._digest_loop),
                ("commit", self._commit_loop),
                ("upload", self._upload_loop),
                ("note", self._note_loop),
            )
        ]
        # A note; a part of a file, or bytes, to be kept under a name; or None to end.
        self._notes: queue.SimpleQueue[str | tuple[str, str, int, int] | tuple[str, bytes] | None] = queue.SimpleQueue()
        self._num_uploads = 0
        self._look_waits = False
        self._num_uploads_lock = threading.Lock()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads, after what was handed over."""
        for tasks in (self._to_digest, self._to_commit, self._to_upload, self._notes):
            tasks.put(None)
        for thread in self._threads:
            thread.join()

    def note(self, text: str) -> None:
        """Keep a supervisor's note beside the checkpoints, where the next one finds it."""
        self._notes.put(text)

    def record(self, name: str, path: str, start: int, end: int) -> None:
        """Keep these bytes of a file beside the checkpoints."""
        self._notes.put((name, path, start, end))

    def keep(self, name: str, data: bytes) -> None:
        """Keep this beside the checkpoints."""
        if self._commits:
            self._notes.put((name, data))

    @property
    def uploading(self) -> bool:
        """Something is, or is about to be, on its way to the durable tier."""
        return self._num_uploads > 0

    def begin_attempt(self, attempt: int, held: Iterable[tuple[int, int]]) -> Fencing:
        """Shut out writers of older attempts, wherever they are; then see what there is to resume from."""
        fencing = self._fencing = Fencing(attempt, frozenset(held))
        threading.Thread(target=self._begin, args=(fencing,), name="checkpoint-fence", daemon=True).start()
        return fencing

    def digest(self, arena: Arena) -> None:
        self._to_digest.put(arena)

    def commit(self, arena: Arena) -> None:
        self._to_commit.put(arena)

    def prune(self) -> None:
        """Somebody else has committed: remove what is too much, and upload what is due."""
        self._to_commit.put("prune")

    def upload(self) -> None:
        """See whether something is due."""
        if self._tiers.local is not None and self._commits:
            with self._num_uploads_lock:
                if self._look_waits:
                    return
                self._look_waits = True
            self._put_upload("look")

    def fetch(self, entry: CatalogEntry, arena: Arena) -> None:
        """Read a checkpoint into an arena, once for all ranks of this node."""
        threading.Thread(target=self._fetch, args=(entry, arena), name="checkpoint-fetch", daemon=True).start()

    # -- an attempt begins ---------------------------------------------------------------------------------------

    def _begin(self, fencing: Fencing) -> None:
        with self._fence_lock:
            if fencing is self._fencing:
                try:
                    if self._commits:
                        self._fence(fencing)
                    catalog = self._tiers.catalog if fencing.unreachable is None else Catalog(self._tiers.first)
                    fencing.newest = next((entry for entry in catalog.scan() if entry.manifest), None)
                except Fenced as error:
                    fencing.error, fencing.fenced = str(error), True
                    self._tell(FencedEvent(reason=str(error)), None)
                except Exception as error:
                    # Whatever it was, the ranks that wait for the answer must get one.
                    fencing.error = _text(error)
        self._flush_retries()
        fencing.answered.set()
        self._tell(FenceAnswered(), None)
        self.upload()

    def _fence(self, fencing: Fencing) -> None:
        local = self._tiers.local
        if local is None:
            self._fence_durable(fencing)
        else:
            local.begin_attempt(fencing.attempt, fencing.held)
            outcome = in_background(lambda: self._fence_durable(fencing), "checkpoint-fence-durable")
            try:
                outcome.result(_PATIENCE_S)
            except OSError as error:
                # It goes on from what is at hand; nothing is published there before this has been made up for.
                reason = "no answer yet" if isinstance(error, TimeoutError) else error.strerror or str(error)
                fencing.unreachable = reason
                tier = self._tiers.name(self._tiers.durable)
                self._tell(TierUnreachable(tier=tier, reason=reason), None)
        if not self._swept:  # nothing of ours is being written yet
            for storage in self._tiers.nearest_first:
                if storage is local or fencing.durable_begun:
                    storage.sweep()
            self._swept = True

    def _fence_durable(self, fencing: Fencing) -> None:
        with self._durable_lock:
            if fencing.durable_begun:
                return
            local, durable = self._tiers.local, self._tiers.durable
            held = fencing.held
            if local is not None:
                # What this machine has committed for itself after others had gone on does not count: its own fence,
                # which only this machine knows, still takes it for good.
                fence = durable.fence()
                held |= {known for known in local.counting() if fence.admits_step(*known)}
            durable.begin_attempt(fencing.attempt, held)
            fencing.durable_begun = True

    # -- digest and commit ---------------------------------------------------------------------------------------

    def _digest_loop(self) -> None:
        while (arena := self._to_digest.get()) is not None:
            arena.digests = {name: digest_buffer(arena.view(offset, size)) for name, offset, size in arena.files}
            arena.digested.set()
            self._tell(Digested(), arena)

    def _commit_loop(self) -> None:
        while (task := self._to_commit.get()) is not None:
            if task != "prune":
                event = self._commit(task, self._tiers.first)
                if isinstance(event, CommitFailed) and self._tiers.local is not None and not task.damaged:
                    # The arena is not done with: the durable tier is to have it.
                    self._tell(event, None)
                    self._put_upload(task)
                    continue
                self._tell(event, task)
                if isinstance(event, CommitFailed):
                    continue
            self._prune(self._tiers.first)
            self._flush_retries()
            self.upload()

    def _commit(self, arena: Arena, storage: Storage) -> Committed | CommitFailed:
        assert arena.info is not None
        # The sweep must not meet our own temporary data.
        while not self._fencing.answered.is_set():
            self._fencing.answered.wait()

        def digest_of(name: str) -> str:
            arena.digested.wait()
            return arena.digests[name]

        files = [
            StagedFile(name, [arena.view(offset, size)], functools.partial(digest_of, name))
            for name, offset, size in arena.files
        ]
        nbytes = sum(size for *_, size in arena.files)
        may_publish, at_once = (lambda: not arena.damaged), storage.writes_at_once
        return self._publish(storage, arena.info, files, nbytes, may_publish, at_once=at_once, since=arena.whole_since)

    def _publish(
        self,
        storage: Storage,
        info: SnapshotInfo,
        files: list[StagedFile],
        nbytes: int,
        may_publish: Callable[[], bool] = lambda: True,
        *,
        at_once: int = 1,
        since: float,
    ) -> Committed | CommitFailed:
        """Commit, and say what has become of it."""
        began, tier = time.process_time(), self._tiers.name(storage)
        storage.watch(self._progress("upload", info.step, nbytes))
        try:
            if storage is self._tiers.durable and self._commits:
                self._fence_durable(self._fencing)
            manifest = commit_snapshot(storage, info, files, may_publish, at_once=at_once)
        except Exception as error:
            # Whatever it was, the run must learn of it and the arena must become free again.
            if isinstance(error, Fenced):
                self._tell(FencedEvent(reason=str(error)), None)
            return CommitFailed(step=info.step, tier=tier, error=_text(error))
        finally:
            self._flush_retries()
        return Committed(
            step=info.step,
            tier=tier,
            nbytes=manifest.total_bytes,
            duration_s=round(time.monotonic() - since, 4),
            cpu_s=round(time.process_time() - began, 4),
        )

    def _prune(self, storage: Storage) -> None:
        tier = self._tiers.name(storage)
        is_durable = storage is self._tiers.durable
        retention = self.retention if is_durable else self._local_retention
        if retention is None:
            return
        try:
            doomed = steps_to_remove(_committed(storage), retention)
            # What is yet to be uploaded stays.
            due = self._due() if doomed and not is_durable else []
            for step in doomed:
                if step not in due:
                    storage.remove(step)
                    self._tell(Pruned(step=step, tier=tier), None)
        except Exception as error:
            self._tell(PruneFailed(tier=tier, error=_text(error)), None)

    def _note_loop(self) -> None:
        """What storage has refused is owed, and tried again with what comes next; of each name the newest alone."""
        durable, ended = self._tiers.durable, False
        # The note goes without a name.
        owed: dict[str, Callable[[], None]] = {}
        while not ended:
            tasks = [self._notes.get()]
            while not self._notes.empty():
                tasks.append(self._notes.get())
            for task in tasks:
                if task is None:
                    ended = True
                elif isinstance(task, str):
                    owed[""] = functools.partial(durable.sidecars.replace_restart_state, task.encode())
                elif len(task) == 2:
                    owed[task[0]] = functools.partial(durable.sidecars.write, *task)
                else:
                    name, path, start, end = task
                    owed[name] = functools.partial(durable.sidecars.write_part, name, Path(path), start, end)
            for name, write in list(owed.items()):
                try:
                    write()
                    del owed[name]
                except Exception as error:
                    self._tell(RestartStateFailed(tier=self._tiers.name(durable), error=_text(error)), None)
                    if isinstance(error, StorageTimeout):
                        break  # nor would the next one get an answer
            self._flush_retries()

    def _flush_retries(self) -> None:
        for retries in self._retries.values():
            retries.flush()

    # -- from tier to tier ---------------------------------------------------------------------------------------

    def _put_upload(self, task: Arena | Literal["look"]) -> None:
        with self._num_uploads_lock:
            self._num_uploads += 1
        self._to_upload.put(task)

    def _upload_loop(self) -> None:
        while (task := self._to_upload.get()) is not None:
            if task == "look":
                self._look_waits = False
                self._upload_due()
            else:
                event = self._commit(task, self._tiers.durable)
                self._tell(event, task)
                self._on_durable = None
                if isinstance(event, Committed):
                    self._prune(self._tiers.durable)
            self._flush_retries()
            with self._num_uploads_lock:
                self._num_uploads -= 1
            self._tell(UploadEnded(), None)

    def _due(self) -> list[int]:
        assert self._tiers.local is not None
        on_durable = (self._on_durable or {}).values()
        return steps_to_upload(_committed(self._tiers.local), on_durable, self.retention or Retention())

    def _upload_due(self) -> None:
        durable, step = self._tiers.durable, -1
        try:
            step = max(self._due(), default=-1)
            if step < 0:
                return
            if self._on_durable is None:
                self._on_durable = {manifest.step: manifest for manifest in _committed(durable)}
            while due := self._due():
                event = self._upload(due[0])
                self._tell(event, None)
                if isinstance(event, CommitFailed):
                    self._on_durable = None
                    return
            self._prune(durable)
        except Exception as error:
            self._tell(CommitFailed(step=step, tier=self._tiers.name(durable), error=_text(error)), None)

    def _upload(self, step: int) -> Committed | CommitFailed:
        """Copy a checkpoint of the local tier to the durable one; its digests are compared on the way."""
        local, durable, since = self._tiers.local, self._tiers.durable, time.monotonic()
        assert local is not None and self._on_durable is not None
        folder = local.directory(step)
        assert folder is not None
        problem: InvalidCheckpoint | None = None

        def staged(file: FileEntry) -> StagedFile:
            digest = RunningDigest(algorithm_of(file.digest))

            def compared() -> str:
                nonlocal problem
                if digest.result() != file.digest:
                    problem = InvalidCheckpoint(local.describe(step), f"{file.name} was altered: its digest differs")
                    raise problem
                return file.digest

            return StagedFile(file.name, digesting(_read(folder / file.name), digest), compared)

        try:
            manifest = local.read_manifest(step)
        except InvalidCheckpoint as error:
            return CommitFailed(step=step, tier=self._tiers.name(durable), error=str(error))
        files = [staged(file) for file in manifest.files]
        event = self._publish(durable, manifest.info, files, manifest.total_bytes, since=since)
        if isinstance(event, Committed):
            self._on_durable[step] = manifest
        elif problem is not None:
            kept = local.quarantine(step)
            self._tell(CheckpointQuarantined(step=step, reason=str(problem), kept_as=kept), None)
        return event

    # -- from storage into memory --------------------------------------------------------------------------------

    def _fetch(self, entry: CatalogEntry, arena: Arena) -> None:
        manifest, storage, since = entry.manifest, entry.storage, time.monotonic()
        assert manifest is not None
        storage.watch(self._progress("download", entry.step, manifest.total_bytes))

        def read(placed: tuple[str, int, int], recorded: FileEntry) -> str:
            name, offset, nbytes = placed
            algorithm = algorithm_of(recorded.digest)
            return read_into(storage.file(manifest, name), arena.view(offset, nbytes), algorithm)

        try:
            with ThreadPoolExecutor(_FETCHED_AT_ONCE, "checkpoint-fetch") as pool:
                digests = list(pool.map(read, arena.files, manifest.files))
            altered = [file.name for file, digest in zip(manifest.files, digests, strict=True) if digest != file.digest]
            if altered:
                raise InvalidCheckpoint(storage.describe(entry.step), f"{altered[0]} was altered: its digest differs")
        except (OSError, CheckpointError) as error:
            # The ranks will read it themselves, and find the fault.
            self._tell(FetchFailed(step=entry.step, error=str(error)), arena)
            return
        arena.digests = {file.name: file.digest for file in manifest.files}
        arena.digested.set()
        duration = round(time.monotonic() - since, 4)
        tier, nbytes = self._tiers.name(storage), manifest.total_bytes
        self._tell(Fetched(step=entry.step, tier=tier, nbytes=nbytes, duration_s=duration), arena)

    def _progress(self, direction: str, step: int, total: int) -> Callable[[int], None]:
        """For people: how far a transfer is, now and then."""
        done, told_at, lock = 0, time.monotonic(), threading.Lock()

        def transferred(nbytes: int) -> None:
            nonlocal done, told_at
            with lock:
                done, now = done + nbytes, time.monotonic()
                due = now - told_at >= _PROGRESS_INTERVAL_S
                told_at = now if due else told_at
            if due:
                self._tell(Transfer(step=step, what=direction, done=done, total=total), None)

        return transferred


def _text(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _committed(storage: Storage) -> list[Manifest]:
    return [found for _, found in storage.survey() if isinstance(found, Manifest)]


def _read(path: Path) -> Iterator[memoryview]:
    """A file's bytes. Not mapped: a disk that fails would end this process."""
    try:
        with path.open("rb", buffering=0) as file:
            while data := file.read(_PIECE_BYTES):
                yield memoryview(data)
    except OSError as error:
        raise InvalidCheckpoint(str(path.parent), f"{path.name} cannot be read ({error.strerror})") from None
