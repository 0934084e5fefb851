"""Chooses the state to resume from, together on all ranks, and reads it.

Candidates are the checkpoints in storage and the snapshots that the nodes' agents still hold. A snapshot takes
precedence where no checkpoint is newer; nodes that do not have it receive it from those that do (`peer_state.py`).
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from checkpointing.agent.client import AgentClient, Offered, OfferedSnapshot
from checkpointing.agent.events import CheckpointQuarantined, Event, Resumed
from checkpointing.commit.catalog import Catalog
from checkpointing.commit.tiers import Tiers
from checkpointing.errors import CheckpointError, InvalidCheckpoint, NoValidCheckpoint, StorageUnreachable
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.format.layout import MODEL_NAME
from checkpointing.format.manifest import MANIFEST_NAME
from checkpointing.host.environment import read_patience_s
from checkpointing.process.ranks import Ranks
from checkpointing.resume.doubts import Condemned, Doubts
from checkpointing.resume.memory_shards import HeldShards, connect, newest_attempt, resumable, shares_by_step
from checkpointing.resume.peer_state import Held, NoMemory, Offer, PeerState, held_by_nodes
from checkpointing.resume.verified_read import BufferCache, DigestShares, altered_files, read_verified
from checkpointing.storage import LocalStorage, Storage
from checkpointing.storage.base import CHECKPOINT_PREFIX, NUMBER

logger = logging.getLogger("checkpointing")

Announce = Callable[[Event], None]


@dataclass(frozen=True)
class _Proposal:
    """Rank 0's proposal: where to resume from, or why that is impossible.

    Attributes:
        step: The step; None starts from the beginning.
        tier: Which storage, counted from the nearest; None for a snapshot in memory.
        error: Why there is no proposal.
        unreachable: The error is that storage does not answer.
        condemned: Checkpoints that are damaged, and renamed once another one could be read.
        again: They are renamed now, and there is another proposal.
    """

    step: int | None = None
    tier: int | None = None
    error: str | None = None
    unreachable: bool = False
    condemned: tuple[Condemned, ...] = ()
    again: bool = False


@dataclass(frozen=True)
class _Problem:
    """Why a rank cannot use what was proposed.

    Attributes:
        rank: The first rank that has found it.
        text: What is wrong.
        unreachable: Storage does not answer.
        damaged: The bytes are not those that were digested.
    """

    rank: int
    text: str
    unreachable: bool
    damaged: bool = True


def choose(
    tiers: Tiers, resume: str | int, ranks: Ranks, client: AgentClient, *, private: bool, before: int | None = None
) -> LoadedCheckpoint | None:
    """Agree on the state to resume from; called by all ranks together.

    Rank 0 proposes the newest, in the nearest place that has it. Every rank reads and verifies the files that it will
    use. Where any rank finds a fault, a checkpoint is read again: its way here may be at fault (`doubts.py`). Then
    this candidate is skipped, and all ranks continue with the next nearest copy, or the step before. A checkpoint that
    was skipped is quarantined (kept, but renamed) once another one could be read.

    Args:
        tiers: Where checkpoints are kept.
        resume: "auto", "never", or a step.
        ranks: This rank, with a group that the training thread uses.
        client: Offers snapshots, and reports everything that is skipped.
        private: Whether tensors must be the reader's own (see `LoadedCheckpoint`).
        before: Resume from before this step, if anything is, so that it is recomputed.

    Returns:
        None where training starts from the beginning.

    Raises:
        NoValidCheckpoint: There are checkpoints, but none can be loaded, or not the one asked for.
        StorageUnreachable: Storage does not answer, so that it is unknown whether there are any; or it gives other
            bytes than were written for every checkpoint.
    """
    return _Choice(tiers, resume, ranks, client, private=private, before=before).make()


class _Choice:
    """One choice, made by all ranks together; see `choose`."""

    def __init__(
        self,
        tiers: Tiers,
        resume: str | int,
        ranks: Ranks,
        client: AgentClient,
        *,
        private: bool,
        before: int | None = None,
    ) -> None:
        self._before = before
        self._tiers, self._resume, self._ranks, self._client, self._private = tiers, resume, ranks, client, private
        # While the agent reads a checkpoint into memory there is time to allocate memory for the copies.
        self._buffers = BufferCache(except_for=MODEL_NAME)
        # Needed whatever `resume` is: the answer comes once writers of older attempts are fenced off.
        settled = resume != "auto"
        offered = client.offer(self._buffers.make, settled=settled) if private else client.offer(settled=settled)
        in_shares, saving = self._compare(offered)
        if saving > max(in_shares, default=-1):
            # A share that some node lacks is of no use in memory, but may be about to become a checkpoint.
            offered = client.offer()
            in_shares, _ = self._compare(offered)
        # The durable tier may be away for a while; its fence keeps us from publishing there what is not the newest.
        self._catalog = tiers.catalog if offered.is_reachable else Catalog(tiers.first)
        snapshots = offered.snapshots if resume == "auto" else []
        self._held |= {step: Held(held.attempt, held.nodes, is_everywhere=False) for step, held in in_shares.items()}
        self._in_shares = in_shares
        self._offered = {
            snapshot.info.step: snapshot
            for snapshot in snapshots
            if snapshot.save is None
            or ((held := in_shares.get(snapshot.info.step)) is not None and held.identity == snapshot.save)
        }
        self._doubts, self._has_reprieved = Doubts(read_patience_s()), False

    def _compare(self, offered: Offered) -> tuple[dict[int, HeldShards], int]:
        """Compare with all ranks what their nodes hold.

        Returns:
            The snapshots in shares that all can resume from, by step; and the newest step of which some node is saving
            a share, or -1.
        """
        ranks, snapshots = self._ranks, offered.snapshots if self._resume == "auto" else []
        attempts = {one.info.step: one.info.attempt for one in snapshots if one.save is None}
        own = Offer(ranks.rank - ranks.local_rank, attempts)
        everyone = ranks.gather((own, shares_by_step(snapshots), offered.saving))
        offers, shares = [offer for offer, *_ in everyone], [share for _, share, _ in everyone]
        newest = max([newest_attempt(shares), *(attempt for offer in offers for attempt in offer.attempts.values())])
        self._held = held_by_nodes(offers, newest)
        self._nodes = [offer.node for offer in offers]
        return resumable(shares, self._nodes, newest), max(saving for *_, saving in everyone)

    def make(self) -> LoadedCheckpoint | None:
        """Go through the candidates until all ranks can use one."""
        while True:
            proposal = self._ranks.broadcast(self._propose())
            assert proposal is not None
            if proposal.error is not None:
                raise (StorageUnreachable if proposal.unreachable else NoValidCheckpoint)(proposal.error)
            step, tier = proposal.step, proposal.tier
            if proposal.again:
                self._quarantine(proposal.condemned)
                self._ranks.barrier()
                self._doubts.forget_condemned()
                continue
            if step is None:
                return None
            storage = _storage_for(self._tiers, tier, step) if tier is not None else None
            point, problem = self._read(storage, step) if storage is not None else self._read_snapshot(step)
            if problem is None:
                assert point is not None
                if any(one.is_remote for one in proposal.condemned) and not self._has_reprieved:
                    self._has_reprieved = True
                    self._doubts.reprieve()
                    point.close()
                    continue
                self._quarantine(proposal.condemned)
                if self._ranks.is_first:
                    source = self._tiers.name(storage) if storage is not None else "memory"
                    self._client.announce(Resumed(step=step, source=source))
                return point
            if problem.unreachable:
                raise StorageUnreachable(problem.text)
            self._skip(step, tier, storage, problem)

    def _propose(self) -> _Proposal | None:
        """Propose a candidate on rank 0; None on other ranks."""
        if not self._ranks.is_first:
            return None
        announce = self._client.announce
        try:
            catalog, resume, doubts = self._catalog, self._resume, self._doubts
            found = _propose(self._tiers, catalog, resume, self._held, doubts, announce, self._before)
            if found.step is None and self._before is not None:
                found = _propose(self._tiers, catalog, resume, self._held, doubts, announce)
            return replace(found, condemned=self._doubts.condemned)
        except OSError as error:
            return _Proposal(error=error.strerror or str(error), unreachable=True)

    def _quarantine(self, condemned: Sequence[Condemned]) -> None:
        """Rename what this rank has found to be damaged: the other machines' disks may hold good copies."""
        for one in condemned if not isinstance(self._resume, int) else ():
            if one.rank == self._ranks.rank:
                storage = _storage_for(self._tiers, one.tier, one.step)
                _quarantine(storage, one.step, one.text, self._client.announce)

    def _read_snapshot(self, step: int) -> tuple[LoadedCheckpoint | None, _Problem | None]:
        """Read a snapshot on all ranks; the nodes that hold it verify it, then it is sent to the others."""
        if step in self._in_shares:
            return self._read_share(step)
        held, node = self._held[step], self._ranks.rank - self._ranks.local_rank
        own = self._offered[step] if node in held.nodes else None
        if own is not None:
            own.prepare()
        point, problem = self._read(None, own)
        if held.is_everywhere or problem is not None:
            return point, problem
        try:
            received = PeerState(self._ranks, held, own).receive()
        except NoMemory as error:
            return None, _Problem(error.rank, str(error), unreachable=False, damaged=False)
        arrived, problem = self._read(None, received)
        return point or arrived, problem

    def _read_share(self, step: int) -> tuple[LoadedCheckpoint | None, _Problem | None]:
        """Read a snapshot of which every node holds some shards at most, and let all ranks read all of these."""
        ranks, held, share = self._ranks, self._in_shares[step], self._offered.get(step)
        if share is not None:
            share.prepare()
        source = share
        if set(held.nodes) < set(self._nodes):
            plain = share.without_shards() if share is not None else None
            try:
                source = PeerState(ranks, self._held[step], plain).receive() or share
            except NoMemory as error:
                return None, _Problem(error.rank, str(error), unreachable=False, damaged=False)
        served = [shard for shard, server in held.servers.items() if server == ranks.rank]
        point, problem = self._read(None, source, served)
        if problem is None:
            assert point is not None and point.spread is not None
            connect(point.spread, ranks, held, share)
        return point, problem

    def _read(
        self, storage: Storage | None, source: OfferedSnapshot | int | None, served: Collection[int] = ()
    ) -> tuple[LoadedCheckpoint | None, _Problem | None]:
        """Read a candidate on all ranks; return this rank's, and the first problem that any rank has found.

        Args:
            storage: Where the checkpoint is; None for a snapshot.
            source: The snapshot, or the checkpoint's step; None on ranks that read nothing.
            served: The shards in memory that this rank verifies.
        """
        ranks = self._ranks
        shares = DigestShares(ranks.local_rank, ranks.local_world_size)
        point: LoadedCheckpoint | None = None
        error: CheckpointError | None = None
        if source is not None:
            point, error = read_verified(
                storage,
                source,
                ranks.rank,
                ranks.world_size,
                private=self._private,
                buffers=self._buffers,
                scratch=self._client.directory,
                shares=shares,
                served=served,
                on_fault=functools.partial(
                    self._client.discard, source if isinstance(source, int) else source.info.step
                ),
            )
        mine = (str(error), isinstance(error, StorageUnreachable)) if error is not None else None
        everyone = ranks.gather((mine, shares))
        problems = [problem for problem, _ in everyone]
        if not any(problems):
            label = point.label if point is not None else "the snapshot of another node"
            for first, what in altered_files([theirs for _, theirs in everyone]):
                problems[first] = (str(InvalidCheckpoint(label, what)), False)
        return point, next((_Problem(rank, *found) for rank, found in enumerate(problems) if found is not None), None)

    def _skip(self, step: int, tier: int | None, storage: Storage | None, problem: _Problem) -> None:
        """Leave a snapshot out from now on, or doubt a checkpoint."""
        if storage is None:
            del self._held[step]
            # Of a share, the other nodes' parts are intact, and may be about to become a checkpoint.
            is_ours = step not in self._in_shares or self._nodes[problem.rank] == self._nodes[self._ranks.rank]
            if problem.damaged and is_ours:
                self._client.discard(step, problem.text)
            if step in self._in_shares:
                # It may be about to become a checkpoint, which is then found to be whole or not.
                self._client.offer()
                self._ranks.barrier()
            logger.warning("the snapshot of step %d is not used: %s", step, problem.text)
            return
        assert tier is not None
        self._doubts.add((step, tier), problem.text, rank=problem.rank, is_remote=storage.directory(step) is None)
        logger.warning("checkpoint-%d could not be read as it was written: %s", step, problem.text)
        storage.refresh(step)


def own_checkpoint(folder: Path) -> tuple[Storage, int] | None:
    """Return storage and step of a folder's checkpoint, if this library has written it; None for any other folder."""
    match = re.fullmatch(rf"{CHECKPOINT_PREFIX}({NUMBER})", folder.name)
    if match is None or not (folder / MANIFEST_NAME).is_file():
        return None
    return LocalStorage(folder.absolute().parent), int(match.group(1))


def _storage_for(tiers: Tiers, tier: int, step: int) -> Storage:
    """Return the storage that was proposed; on a machine whose local tier never had that step, the durable one."""
    storage = tiers.nearest_first[tier]
    return storage if storage is tiers.durable or step in storage.steps() else tiers.durable


def _propose(
    tiers: Tiers,
    catalog: Catalog,
    resume: str | int,
    snapshots: Mapping[int, Held],
    doubts: Doubts,
    announce: Announce,
    before: int | None = None,
) -> _Proposal:
    """Propose a candidate, perhaps one that is to be read again; waits until it is time for that.

    Args:
        tiers: Where checkpoints are kept.
        catalog: The checkpoints that can be reached.
        resume: "auto", "never", or a step.
        snapshots: Those in memory, by step.
        doubts: What could not be read as it was written.
        announce: Reports checkpoints that are quarantined.
        before: The step that all candidates are before.
    """
    if resume == "never":
        return _Proposal()
    storages = tiers.nearest_first
    if isinstance(resume, int):
        return _propose_step(storages, catalog, resume, doubts)
    end = sys.maxsize if before is None else before
    newest = max((step for step in _usable(snapshots, catalog) if step < end), default=-1)
    found = _newest_whole(storages, catalog, newest, end, doubts, announce)
    if found is not None:
        return found
    if newest >= 0:
        return _Proposal(newest)
    remote = [one for one in doubts.condemned if one.is_remote]
    if remote:
        return _Proposal(
            error=f"{tiers.durable.location} gives other bytes than were written, for each of its checkpoints "
            f"({remote[0].text}): the storage, or the way to it, is at fault. Nothing was renamed or deleted",
            unreachable=True,
        )
    if doubts.condemned:
        return _Proposal(again=True)
    kept = [name for storage in catalog.storages for name in storage.quarantined()]
    if kept:
        return _Proposal(
            error=f"{tiers.durable.location} holds checkpoints but none is valid ({', '.join(kept)}). Nothing was "
            "deleted: repair one, or move them away to start from step 0."
        )
    if tiers.durable not in catalog.storages:
        return _Proposal(
            error=f"{tiers.durable.location} cannot be reached, and there is no other checkpoint on this machine",
            unreachable=True,
        )
    return _Proposal()


def _usable(snapshots: Mapping[int, Held], catalog: Catalog) -> set[int]:
    """Return the steps of the snapshots that belong to the newest line of history.

    What some nodes hold may be older than what others have committed since.
    """
    everywhere = {step for step, held in snapshots.items() if held.is_everywhere}
    if len(everywhere) == len(snapshots):
        return everywhere
    committed = next((entry.manifest.attempt for entry in catalog.scan() if entry.manifest is not None), 0)
    return everywhere | {step for step, held in snapshots.items() if held.attempt >= committed}


def _newest_whole(
    storages: Sequence[Storage], catalog: Catalog, newest: int, end: int, doubts: Doubts, announce: Announce
) -> _Proposal | None:
    """Propose the newest checkpoint after a step, and before another, that is not condemned; None without one."""
    while True:
        doubted = None
        for entry in catalog.scan():
            key = (entry.step, storages.index(entry.storage))
            if entry.step <= newest:
                return None
            # A stock Trainer's is somebody's work, and not part of this run.
            if entry.step >= end or doubts.is_condemned(key) or entry.is_foreign:
                continue
            if doubts.is_hopeless(key):
                label = entry.storage.describe(entry.step)
                return _Proposal(error=f"{label} has other bytes each time it is read", unreachable=True)
            if entry.manifest is not None:
                doubts.wait(key)
                return _Proposal(*key)
            problem = f"{entry.storage.describe(entry.step)}: {entry.problem}"
            if entry.is_stale:
                _quarantine(entry.storage, entry.step, problem, announce)
                continue
            is_remote = entry.storage.directory(entry.step) is None
            doubts.add(key, problem, rank=0, is_remote=is_remote)
            if not doubts.is_condemned(key):
                doubted = key
                entry.storage.refresh(entry.step)
                break
        if doubted is None:
            return None
        doubts.wait(doubted)


def _propose_step(storages: Sequence[Storage], catalog: Catalog, step: int, doubts: Doubts) -> _Proposal:
    for entry in catalog.scan():
        key = (step, storages.index(entry.storage))
        if entry.step == step and entry.manifest is not None and not doubts.is_condemned(key):
            doubts.wait(key)
            return _Proposal(*key)
    try:
        catalog.find(step)
    except InvalidCheckpoint as error:
        return _Proposal(error=f"--resume {step}: {error}")
    return _Proposal(error=f"--resume {step}: {', '.join(one.text for one in doubts.condemned)}")


def _quarantine(storage: Storage, step: int, problem: str, announce: Announce) -> None:
    kept = storage.quarantine(step)
    logger.warning("checkpoint-%d is not used: %s. It is kept as %s", step, problem, kept)
    announce(CheckpointQuarantined(step=step, reason=problem, kept_as=kept))
