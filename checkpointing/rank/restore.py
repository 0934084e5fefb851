"""Chooses the state to go on from, together on all ranks, and reads it.

Candidates are the checkpoints in storage and the snapshots that the nodes' agents still hold; a snapshot goes first
where every node has it whole and no checkpoint is newer.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from checkpointing.agent.client import AgentClient, OfferedSnapshot
from checkpointing.catalog import Catalog
from checkpointing.data.cursor import state_name as data_state_name
from checkpointing.digest import ALGORITHM, algorithm_of, digest_of_parts, num_parts, part_digests
from checkpointing.errors import CheckpointError, InvalidCheckpoint, NoValidCheckpoint, StorageUnreachable
from checkpointing.events import CheckpointQuarantined, Event, Resumed
from checkpointing.failpoints import failpoint
from checkpointing.layout import (
    MODEL_NAME,
    PER_RANK_PREFIXES,
    WEIGHTS_NAMES,
    loop_state_name,
    rank_state_name,
)
from checkpointing.manifest import MANIFEST_NAME, missing_member
from checkpointing.rank import rng
from checkpointing.rank.restore_point import SMALL_BYTES, RestorePoint
from checkpointing.reading import fault, private_memory, read_private, read_shared
from checkpointing.storage import LocalStorage, Storage
from checkpointing.storage.base import CHECKPOINT_PREFIX, NUMBER, RemoteFile
from checkpointing.tiers import Tiers

logger = logging.getLogger("checkpointing")
# Model and optimizer are verified side by side.
_FILES_AT_ONCE = 2
# Of one rank, for each file: some 20 GB/s each (2 cores, 2026-11-23).
_DIGEST_THREADS = 4
_ALTERED = "was altered: its digest is not the one that was recorded"

Announce = Callable[[Event], None]


class Room:
    """Memory for the reader's own copies of large files, made while there is nothing else to do."""

    def __init__(self, except_for: str) -> None:
        """`except_for`: the file that is not copied."""
        self._except_for = except_for
        self._made: dict[str, memoryview] = {}

    def make(self, sizes: Mapping[str, int], enough: Callable[[], bool]) -> None:
        """For files of these sizes in bytes; ends as soon as it is enough, for from then on it is a delay."""
        for name, nbytes in sizes.items():
            if nbytes > SMALL_BYTES and name != self._except_for and not enough():
                self._made[name] = private_memory(nbytes, enough)

    def take(self, name: str, nbytes: int) -> memoryview | None:
        """What was made for a file, unless that was of another checkpoint."""
        memory = self._made.pop(name, None)
        return memory if memory is not None and memory.nbytes == nbytes else None


@dataclass(frozen=True)
class _Proposal:
    """Rank 0's: where to go on from; `step` None starts afresh; or why neither is possible.

    Attributes:
        tier: which storage, counted from the nearest; None for a snapshot in memory.
        unreachable: the error is that storage does not answer.
    """

    step: int | None = None
    tier: int | None = None
    error: str | None = None
    unreachable: bool = False


class Shares:
    """The digests of those parts of large files that one rank of a node has computed.

    Attributes:
        files: by name, the recorded digest, the number of parts, and the digests of this rank's parts, by number.
    """

    def __init__(self, local_rank: int = 0, local_world_size: int = 1) -> None:
        self.local_rank, self.local_world_size = local_rank, local_world_size
        self.files: dict[str, tuple[str, int, dict[int, bytes]]] = {}

    def add(self, name: str, recorded: str, data: memoryview) -> None:
        """Digest this rank's share of a file that all ranks of the node see in the same memory."""
        count = num_parts(len(data))
        self.files[name] = (recorded, count, self._digests(data, range(self.local_rank, count, self.local_world_size)))

    def digest(self, data: memoryview) -> str:
        """Digest a file that is this rank's alone."""
        return digest_of_parts(self._digests(data, range(num_parts(len(data)))).values())

    def _digests(self, data: memoryview, numbers: Sequence[int]) -> dict[int, bytes]:
        # More threads would only wait for the memory.
        num_threads = max(1, min(_DIGEST_THREADS, (os.cpu_count() or 1) // self.local_world_size))
        return part_digests(data, numbers, num_threads)


def altered_file(shares: Sequence[Shares]) -> str | None:
    """The first file whose parts, as the ranks of a node have digested them, do not make its recorded digest."""
    for name, (recorded, count, _) in shares[0].files.items():
        digests: dict[int, bytes] = {}
        for one in shares:
            digests |= one.files[name][2]
        if digest_of_parts(digests[number] for number in range(count)) != recorded:
            return name
    return None


def _altered_files(shares: Sequence[Shares]) -> Iterator[tuple[int, str]]:
    """By node, the number of its first rank, and a file that was altered. `shares` are all ranks', by number."""
    firsts = [number for number, one in enumerate(shares) if one.local_rank == 0]
    for first, end in itertools.pairwise([*firsts, len(shares)]):
        altered = altered_file(shares[first:end])
        if altered is not None:
            yield first, altered


def choose(
    tiers: Tiers,
    resume: str | int,
    group: dist.ProcessGroup | None,
    rank: int,
    world_size: int,
    client: AgentClient,
    *,
    private: bool,
    local_rank: int = 0,
    local_world_size: int = 1,
) -> RestorePoint | None:
    """Agree on the state to resume from; called by all ranks together.

    Rank 0 proposes the newest, in the nearest place that has it; every rank reads and verifies the files that it will
    use; where any rank finds a fault, it is passed over (a checkpoint is set aside: kept, renamed) and all go on to the
    next nearest, or the one before.

    Args:
        resume: "auto", "never", or a step.
        group: a gloo group of all ranks, or None for one process.
        client: asked for snapshots, and told of everything that is passed over.
        private: whether tensors must be the reader's own (see `RestorePoint`).
        local_rank, local_world_size: this rank among those of its machine, whose numbers follow each other: each
            verifies a share of what they all see in the same memory.

    Returns:
        None where training starts from the beginning.

    Raises:
        NoValidCheckpoint: there are checkpoints, but none can be loaded, or not the one asked for.
        StorageUnreachable: whether there are any cannot be said now.
    """
    # Asked for in any case: the answer comes when writers of older attempts are shut out.
    # While the agent reads a checkpoint into memory there is time to make room for the copies.
    room = Room(except_for=MODEL_NAME)
    snapshots, reachable = client.offer(room.make) if private and resume == "auto" else client.offer()
    # The durable tier may be away for a while; its fence keeps us from publishing there what is not the newest.
    catalog = tiers.catalog if reachable else Catalog(tiers.first)
    offered = {snapshot.info.step: snapshot for snapshot in snapshots}
    if resume != "auto":
        offered = {}
    on_all_nodes = set(offered)
    if group is not None:
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, {step: s.info.attempt for step, s in offered.items()}, group=group)
        # The same step of the same attempt, or it is another line of history.
        on_all_nodes = {s for s in offered if all(steps.get(s) == everyone[0].get(s) for steps in everyone)}
    faulty: set[tuple[int, int]] = set()
    while True:
        proposals: list[_Proposal | None] = [None]
        if rank == 0:
            try:
                proposals = [_propose(tiers, catalog, resume, on_all_nodes, faulty, client.announce)]
            except OSError as error:
                proposals = [_Proposal(error=error.strerror or str(error), unreachable=True)]
        if group is not None:
            dist.broadcast_object_list(proposals, src=0, group=group)
        proposal = proposals[0]
        assert proposal is not None
        if proposal.error is not None:
            raise StorageUnreachable(proposal.error) if proposal.unreachable else NoValidCheckpoint(proposal.error)
        step, tier = proposal.step, proposal.tier
        if step is None:
            return None
        storage = _place(tiers, tier, step) if tier is not None else None
        source = offered[step] if storage is None else step
        scratch = client.directory
        shares = Shares(local_rank, local_world_size)
        point, problem = _read(
            storage, source, rank, world_size, private=private, room=room, scratch=scratch, shares=shares
        )
        mine = (str(problem), isinstance(problem, StorageUnreachable)) if problem is not None else None
        verdicts: list[Any] = [(mine, shares)] * world_size
        if group is not None:
            dist.all_gather_object(verdicts, (mine, shares), group=group)
        problems = [problem for problem, _ in verdicts]
        if point is not None and not any(problems):
            for first, name in _altered_files([shares for _, shares in verdicts]):
                problems[first] = (str(InvalidCheckpoint(point.place, f"{name} {_ALTERED}")), False)
        finder = next((number for number, text in enumerate(problems) if text is not None), None)
        if finder is None:
            assert point is not None
            if rank == 0:
                place = tiers.name(storage) if storage is not None else "memory"
                client.announce(Resumed(step=step, source=place))
            return point
        found, unreachable = problems[finder] or ("", False)
        if unreachable:
            raise StorageUnreachable(found)
        if storage is None:
            on_all_nodes.discard(step)
            client.discard(step, found)
            logger.warning("the snapshot of step %d is not used: %s", step, found)
            continue
        assert tier is not None
        faulty.add((step, tier))
        if isinstance(resume, int) and storage is tiers.durable:
            raise NoValidCheckpoint(f"--resume {resume}: {found}")
        # By who found it: the others' disks may hold good copies.
        if finder == rank and not isinstance(resume, int):
            _set_aside(storage, step, found, client.announce)


def read_checkpoint(storage: Storage, step: int, rank: int, world_size: int) -> RestorePoint:
    """A checkpoint as one rank reads it, verified; nobody else is asked.

    Raises:
        InvalidCheckpoint: it is not whole, or was altered.
        StorageUnreachable: it cannot be read now.
    """
    point, problem = _read(storage, step, rank, world_size, private=True, room=Room(except_for=""), shares=Shares())
    if problem is not None:
        raise problem
    assert point is not None
    return point


def own_checkpoint(folder: Path) -> tuple[Storage, int] | None:
    """Where a folder's checkpoint lies, if this library has written it; None for any other folder."""
    match = re.fullmatch(rf"{CHECKPOINT_PREFIX}({NUMBER})", folder.name)
    if match is None or not (folder / MANIFEST_NAME).is_file():
        return None
    return LocalStorage(folder.absolute().parent), int(match.group(1))


def _place(tiers: Tiers, tier: int, step: int) -> Storage:
    """The storage that was proposed; on a machine whose local tier never had that step, the durable one."""
    storage = tiers.nearest_first[tier]
    return storage if storage is tiers.durable or step in storage.steps() else tiers.durable


def _propose(
    tiers: Tiers,
    catalog: Catalog,
    resume: str | int,
    snapshots: set[int],
    faulty: set[tuple[int, int]],
    announce: Announce,
) -> _Proposal:
    """Rank 0's part. `faulty`: step and tier of what a rank could not read."""
    if resume == "never":
        return _Proposal()
    storages = tiers.nearest_first
    entries = ((storages.index(entry.storage), entry) for entry in catalog.scan())
    if isinstance(resume, int):
        for tier, entry in entries:
            if entry.step == resume and entry.manifest is not None and (resume, tier) not in faulty:
                return _Proposal(resume, tier)
        try:
            catalog.find(resume)
        except InvalidCheckpoint as error:
            return _Proposal(error=f"--resume {resume}: {error}")
        return _Proposal(error=f"--resume {resume}: no copy of it can be read")
    newest = max(snapshots, default=-1)
    for tier, entry in entries:
        if entry.step <= newest:
            break
        if (entry.step, tier) in faulty:
            continue
        if entry.manifest is not None:
            return _Proposal(entry.step, tier)
        if entry.is_foreign:
            # A stock Trainer's: somebody's work, and no part of this run.
            continue
        problem = f"{entry.storage.describe(entry.step)}: {entry.problem}"
        _set_aside(entry.storage, entry.step, problem, announce)
    if newest >= 0:
        return _Proposal(newest)
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


def _read(
    storage: Storage | None,
    source: OfferedSnapshot | int,
    rank: int,
    world_size: int,
    *,
    private: bool,
    room: Room,
    shares: Shares,
    scratch: Path | None = None,
) -> tuple[RestorePoint | None, CheckpointError | None]:
    # Rank 0's is also for those that were not there when it was written.
    own = {rng.file_name(rank, world_size), loop_state_name(rank), loop_state_name(0)}
    own |= {data_state_name(rank, world_size), data_state_name(0, 1), data_state_name(0, 2)}
    own |= {rank_state_name(rank), rank_state_name(0)}
    path: Path | None = None
    try:
        if isinstance(source, int):
            assert storage is not None
            path, place = storage.directory(source), storage.describe(source)
            manifest = storage.read_manifest(source)
            info = manifest.info
            found: dict[str, tuple[Path | RemoteFile | memoryview, str]] = {
                file.name: (storage.file(manifest, file.name), file.digest) for file in manifest.files
            }
        else:
            place, info = f"the snapshot of step {source.info.step} in memory", source.info
            found = {name: (view, source.digests[name]) for name, view in source.files.items()}

        if (lacking := missing_member(found)) is not None:
            raise InvalidCheckpoint(place, f"{lacking} is not among its files")

        def verified(name: str) -> memoryview:
            bytes_of, digest = found[name]
            # A model is copied into its parameters anyway, and what lies in memory need not be read ahead.
            in_place = not private or (name in WEIGHTS_NAMES and isinstance(bytes_of, memoryview))
            memory = room.take(name, bytes_of.nbytes) if isinstance(bytes_of, memoryview) else None
            algorithm = algorithm_of(digest)
            # What ranks read from storage each by itself, each has to verify while it reads.
            in_parts = algorithm == ALGORITHM and (
                isinstance(bytes_of, memoryview) or (in_place and isinstance(bytes_of, Path))
            )
            running = None if in_parts else algorithm
            try:
                data, actual = read_shared(bytes_of, running) if in_place else read_private(bytes_of, memory, running)
            except OSError as error:
                raise fault(place, name, error) from None
            if in_parts and shares.local_world_size > 1 and name not in own and num_parts(len(data)) > 1:
                shares.add(name, digest, data)
                return data
            if (shares.digest(data) if in_parts else actual) != digest:
                raise InvalidCheckpoint(place, f"{name} {_ALTERED}")
            return data

        names = [name for name in found if name in own or not name.startswith(PER_RANK_PREFIXES)]
        with ThreadPoolExecutor(_FILES_AT_ONCE, "checkpoint-verify") as pool:
            files = dict(zip(names, pool.map(verified, names), strict=True))
        failpoint("restore.read")
    except (CheckpointError, OSError) as error:
        return None, error if isinstance(error, CheckpointError) else StorageUnreachable(str(error))
    point = RestorePoint(
        place,
        step=info.step,
        world_size=info.world_size,
        samples_consumed=info.samples_consumed,
        files=files,
        path=path,
        private=private,
        scratch=scratch,
    )
    return point, None


def _set_aside(storage: Storage, step: int, problem: str, announce: Announce) -> None:
    kept = storage.quarantine(step)
    logger.warning("checkpoint-%d is not used: %s. It is kept as %s", step, problem, kept)
    announce(CheckpointQuarantined(step=step, reason=problem, kept_as=kept))
