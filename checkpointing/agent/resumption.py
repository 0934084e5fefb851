"""What an attempt may resume from: snapshots in memory, and the newest checkpoint, read before ranks ask for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from checkpointing.agent.arenas import Arena, ArenaPool, ArenaState
from checkpointing.agent.events import Event, SnapshotDamaged, SnapshotDropped
from checkpointing.agent.fencing import Fencing
from checkpointing.agent.reporting import stamped
from checkpointing.agent.scheduler import Scheduler
from checkpointing.agent.writers import Writers
from checkpointing.commit.catalog import CatalogEntry
from checkpointing.format.manifest import Manifest
from checkpointing.host.shared_memory import place_on_pages


class Resumption:
    """Used by the agent's main thread alone."""

    def __init__(
        self, pool: ArenaPool, scheduler: Scheduler, workers: Writers, publish: Callable[[Event], None]
    ) -> None:
        """Create it.

        Args:
            pool: The arenas.
            scheduler: Knows which snapshots are whole.
            workers: Read checkpoints.
            publish: Takes events for monitors.
        """
        self._pool, self._scheduler, self._workers, self._publish = pool, scheduler, workers, publish
        self._fencing: Fencing | None = None
        self._fetch_wanted = False

    def begin(self, fencing: Fencing, *, fetch: bool) -> None:
        """Begin an attempt, or its next stage.

        Args:
            fencing: The begin of the attempt at its storage.
            fetch: Whether the newest checkpoint is what will be resumed from: it may be read before ranks ask.
        """
        self._fencing, self._fetch_wanted = fencing, fetch

    @property
    def fetching(self) -> Arena | None:
        """The arena that a checkpoint is being read into."""
        return next((arena for arena in self._scheduler.of_stage() if arena.state is ArenaState.FETCHING), None)

    @property
    def saving(self) -> int:
        """The newest step of which a share is being saved, which might become a checkpoint to resume from; or -1."""
        shares = (arena for arena in self._whole() if arena.share is not None and arena.num_tasks > 0)
        return max((arena.step for arena in shares), default=-1)

    def is_known(self, *, settled: bool) -> bool:
        """Return whether ranks can be answered: older attempts are fenced, and every snapshot is whole and has digests.

        Args:
            settled: Wait for shares that are being saved, too: ranks cannot resume from what they have in memory.
        """
        if settled and self.saving >= 0:
            return False
        digested = all(arena.digested.is_set() for arena in self._whole())
        return digested and self._fencing is not None and self._fencing.answered.is_set() and self.fetching is None

    def refusal(self) -> dict[str, str] | None:
        """Return why the attempt cannot begin, as ranks are answered; None where it can."""
        assert self._fencing is not None
        if self._fencing.error is None:
            return None
        return {"error" if self._fencing.fenced else "storage_error": self._fencing.error}

    @property
    def unreachable(self) -> str | None:
        """Why the attempt begins without the durable tier; None where it does not."""
        assert self._fencing is not None
        return self._fencing.unreachable

    def offered(self) -> list[Arena]:
        """Return the arenas whose snapshots ranks may resume from: of a share, if some node has every other shard.

        A step that was saved after a snapshot had been taken of it may be there twice. The first is offered: every node
        has it whole where one has gone on to the second. Of two attempts, that of the newer one is.
        """
        usable = (arena for arena in self._scheduler.of_stage() if arena.is_usable and arena.info is not None)
        offered = [arena for arena in usable if arena.share is None or arena.share.in_memory]
        first: dict[int, Arena] = {}
        for arena in sorted(offered, key=lambda arena: (-arena.info.attempt if arena.info else 0, arena.whole_since)):
            first.setdefault(arena.step, arena)
        return list(first.values())

    def discard(self, step: int, reason: str, *, damaged: bool) -> None:
        """Never offer a snapshot again.

        Args:
            step: Its step.
            reason: Why not.
            damaged: A rank has read other bytes than were digested: it is not published, either.
        """
        for arena in self._scheduler.whole():
            if arena.step != step or arena.damaged:
                continue
            if not damaged:
                self._publish(stamped(SnapshotDropped(step=step, reason=reason), self._workers.stage))
                self._scheduler.spend(arena)
            else:
                arena.damaged = True
                self._publish(stamped(SnapshotDamaged(step=step, reason=reason), self._workers.stage))
                if arena.num_tasks == 0:
                    arena.state = ArenaState.FREE

    def _whole(self) -> list[Arena]:
        """Return the arenas that hold a whole snapshot, of any stage."""
        return [arena for arena in self._pool.arenas if arena.state is ArenaState.WHOLE]

    def fetch_newest(self) -> None:
        """Read the newest checkpoint while ranks are still starting, unless a snapshot or a file here is as new."""
        assert self._fencing is not None
        entry = self._fencing.newest if self._fencing.answered.is_set() else None
        if not self._fetch_wanted or entry is None or entry.storage.directory(entry.step) is not None:
            return
        self._fetch_wanted = False
        manifest, held = entry.manifest, self._pool.newest(self._workers.stage.name)
        assert manifest is not None
        if manifest.is_sharded:
            # No node needs all of it, or could hold it.
            return
        on_its_way = any(a.state is ArenaState.FETCHING and a.step == entry.step for a in self._scheduler.of_stage())
        if not on_its_way and (held is None or held.step < entry.step):
            self._fetch(entry, manifest)

    def _fetch(self, entry: CatalogEntry, manifest: Manifest) -> None:
        offsets, end = place_on_pages(file.size for file in manifest.files)
        # The second arena is allocated during the first step.
        arena = self._pool.take(end, num_wanted=1)
        if arena is None:
            return
        arena.begin(entry.step, self._workers.stage.name, ArenaState.FETCHING)
        arena.files = [(file.name, offset, file.size) for file, offset in zip(manifest.files, offsets, strict=True)]
        arena.info = manifest.info
        arena.commit_wanted = True  # It is committed already.
        arena.num_tasks += 1
        self._workers.current.fetch(entry, arena)


def described(arena: Arena) -> dict[str, Any]:
    """Return an offered snapshot as ranks receive it: what it is of, its arena, and its files with their digests."""
    assert arena.info is not None
    files = [(name, offset, size, arena.digests[name]) for name, offset, size in arena.files]
    files += [(name, *place) for name, place in arena.guests.items()]
    save = arena.share.identity if arena.share is not None else None
    return {**asdict(arena.info), "arena": arena.number, "files": files, "save": save}
