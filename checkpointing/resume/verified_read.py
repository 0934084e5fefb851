"""Reads and verifies the files of one checkpoint, or of one snapshot in memory."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from checkpointing.agent.client import OfferedSnapshot
from checkpointing.commit.reading import fault, private_memory, read_private, read_shared
from checkpointing.commit.shard_reading import Recorded, altered, recorded_files
from checkpointing.data.cursor import state_name as data_state_name
from checkpointing.errors import CheckpointError, InvalidCheckpoint, StorageUnreachable
from checkpointing.files.loaded_checkpoint import SMALL_BYTES, LoadedCheckpoint
from checkpointing.files.spread_files import OnFault, open_share, open_spread
from checkpointing.format.digest import ALGORITHM, algorithm_of, digest_of_parts, num_parts, part_digests
from checkpointing.format.layout import (
    EXTRA_STATE_NAME,
    PER_RANK_PREFIXES,
    WEIGHTS_NAMES,
    loop_state_name,
    rank_object_name,
    rank_state_name,
    script_state_name,
    step_record_name,
)
from checkpointing.format.manifest import SnapshotInfo, missing_member
from checkpointing.format.shard_index import FOLDER, INDEX_NAME
from checkpointing.host.failpoints import failpoint
from checkpointing.process import rng
from checkpointing.state.replicas import OBJECTS
from checkpointing.storage import Storage

# Model and optimizer are verified at the same time.
_FILES_AT_ONCE = 2
# Ranks that compute the same samples together are on one node.
_LARGEST_GROUP = 64
# Of one rank, for each file: some 20 GB/s each (2 cores, 2026-11-23).
_DIGEST_THREADS = 4


class BufferCache:
    """Memory for the reader's own copies of large files, allocated while there is nothing else to do.

    Args:
        except_for: The file that is not copied.
    """

    def __init__(self, except_for: str) -> None:
        self._except_for = except_for
        self._made: dict[str, memoryview] = {}

    def make(self, sizes: Mapping[str, int], enough: Callable[[], bool]) -> None:
        """Allocate memory for files of these sizes in bytes; stop as soon as `enough()`, since it then only delays."""
        for name, nbytes in sizes.items():
            if nbytes > SMALL_BYTES and name != self._except_for and not enough():
                self._made[name] = private_memory(nbytes, enough)

    def take(self, name: str, nbytes: int) -> memoryview | None:
        """Return the memory for a file, unless it was allocated for another checkpoint."""
        memory = self._made.pop(name, None)
        return memory if memory is not None and memory.nbytes == nbytes else None


class DigestShares:
    """The digests of those parts of large files that one rank of a node has computed.

    Args:
        local_rank: Number of this rank on its node.
        local_world_size: Number of ranks on this node.

    Attributes:
        files: By name, the recorded digest, the number of parts, and the digests of this rank's parts, by number.
    """

    def __init__(self, local_rank: int = 0, local_world_size: int = 1) -> None:
        self.local_rank, self.local_world_size = local_rank, local_world_size
        self.files: dict[str, tuple[str, int, dict[int, bytes]]] = {}

    def add(self, name: str, recorded: str, data: memoryview) -> None:
        """Digest this rank's share of a file that all ranks of the node see in the same memory."""
        count = num_parts(len(data))
        self.files[name] = (recorded, count, self._digests(data, range(self.local_rank, count, self.local_world_size)))

    def digest(self, data: memoryview) -> str:
        """Digest a file that only this rank reads."""
        return digest_of_parts(self._digests(data, range(num_parts(len(data)))).values())

    def _digests(self, data: memoryview, numbers: Sequence[int]) -> dict[int, bytes]:
        # Memory bandwidth limits the number of threads that help.
        num_threads = max(1, min(_DIGEST_THREADS, (os.cpu_count() or 1) // self.local_world_size))
        return part_digests(data, numbers, num_threads)


def altered_file(shares: Sequence[DigestShares]) -> str | None:
    """Return what is wrong with the first file of which the ranks of a node have read other bytes; None with none."""
    for name, (recorded, count, _) in shares[0].files.items():
        digests: dict[int, bytes] = {}
        for one in shares:
            digests |= one.files[name][2]
        found = digest_of_parts(digests[number] for number in range(count))
        if found != recorded:
            return altered(name, found)
    return None


def altered_files(shares: Sequence[DigestShares]) -> Iterator[tuple[int, str]]:
    """Yield, by node, the number of its first rank and what is wrong with a file. `shares` are all ranks', by rank."""
    firsts = [number for number, one in enumerate(shares) if one.local_rank == 0]
    for first, end in itertools.pairwise([*firsts, len(shares)]):
        problem = altered_file(shares[first:end])
        if problem is not None:
            yield first, problem


@dataclass(frozen=True)
class _Located:
    """The files of a checkpoint or of a snapshot.

    Attributes:
        label: What it is called in messages.
        info: Its step, world size and data cursor.
        files: Each file's bytes and recorded digest, by name.
        path: Its directory, where it is on this machine.
    """

    label: str
    info: SnapshotInfo
    files: Mapping[str, Recorded]
    path: Path | None = None


@dataclass(frozen=True)
class _Verifier:
    """Reads one file at a time; see `read_verified`."""

    located: _Located
    own: frozenset[str]
    private: bool
    buffers: BufferCache
    shares: DigestShares

    def read(self, name: str) -> memoryview:
        """Read a file and verify it, or this rank's share of it.

        Raises:
            InvalidCheckpoint: The file was altered.
            StorageUnreachable: It cannot be read now.
        """
        label, shares = self.located.label, self.shares
        source, digest = self.located.files[name]
        # A model is copied into its parameters anyway, and what is in memory need not be read ahead.
        in_place = not self.private or (name in WEIGHTS_NAMES and isinstance(source, memoryview))
        memory = self.buffers.take(name, source.nbytes) if isinstance(source, memoryview) else None
        algorithm = algorithm_of(digest)
        # Files that each rank reads from storage for itself are verified while they are read.
        in_parts = algorithm == ALGORITHM and (
            isinstance(source, memoryview) or (in_place and isinstance(source, Path))
        )
        running = None if in_parts else algorithm
        try:
            data, actual = read_shared(source, running) if in_place else read_private(source, memory, running)
        except OSError as error:
            raise fault(label, name, error) from None
        if in_parts and shares.local_world_size > 1 and name not in self.own and num_parts(len(data)) > 1:
            shares.add(name, digest, data)
            return data
        found = shares.digest(data) if in_parts else actual
        if found != digest:
            raise InvalidCheckpoint(label, altered(name, found))
        return data


def read_verified(
    storage: Storage | None,
    source: OfferedSnapshot | int,
    rank: int,
    world_size: int,
    *,
    private: bool,
    buffers: BufferCache,
    shares: DigestShares,
    scratch: Path | None = None,
    alone: bool = False,
    served: Collection[int] = (),
    without: Collection[str] = (),
    on_fault: OnFault = lambda reason: None,
) -> tuple[LoadedCheckpoint | None, CheckpointError | None]:
    """Read what one rank needs of a checkpoint or a snapshot.

    Args:
        storage: Where the checkpoint is; None for a snapshot.
        source: The snapshot, or the checkpoint's step.
        rank: Number of this rank.
        world_size: Number of all ranks.
        private: Whether tensors must be the reader's own; see `LoadedCheckpoint`.
        buffers: Memory for copies.
        shares: Takes the digests of parts that this rank verifies for all ranks of its node.
        scratch: Folder for temporary files.
        alone: No other rank reads it: this one verifies all shards.
        served: The shards in memory that this rank verifies, for all ranks.
        without: Files that nobody will read.
        on_fault: Called with the reason where a share in memory cannot be read after all.

    Returns:
        The state, or why it cannot be used.
    """
    try:
        located = _locate(storage, source)
        if (lacking := missing_member(located.files)) is not None:
            raise InvalidCheckpoint(located.label, f"{lacking} is not among its files")
        # Rank 0's files are also for ranks that did not exist when the checkpoint was written.
        own = {rng.file_name(rank, world_size), *rng.FIRST_RANKS_FILES, loop_state_name(rank), loop_state_name(0)}
        own |= {step_record_name(rank), script_state_name(rank), script_state_name(0)}
        # Ranks that draw the same samples save one position. How many they are is known later.
        groups = {rank // size for size in range(1, min(world_size, _LARGEST_GROUP) + 1)}
        own |= {data_state_name(group, 2) for group in groups} | {data_state_name(0, 1), data_state_name(0, 2)}
        own |= {rank_state_name(rank), rank_state_name(0), *(rank_object_name(name, rank) for name in OBJECTS)}
        if located.info.world_size != world_size:
            # Objects in `states` may be divided among the present ranks.
            own |= set(map(rank_state_name, range(located.info.world_size)))
        # Stages of other ranks may be this one's now.
        own |= {rank_object_name(EXTRA_STATE_NAME, other) for other in range(located.info.world_size)}
        # What ranks had added up is divided among the present ones.
        own |= {loop_state_name(other) for other in range(rank, located.info.world_size, world_size)}
        verifier = _Verifier(located, frozenset(own), private, buffers, shares)
        names = [
            name
            for name in located.files
            if (name in own or not name.startswith((*PER_RANK_PREFIXES, FOLDER)) or name == INDEX_NAME)
            and name not in without
        ]
        with ThreadPoolExecutor(_FILES_AT_ONCE, "checkpoint-verify") as pool:
            files = dict(zip(names, pool.map(verifier.read, names), strict=True))
        spread = None
        if INDEX_NAME in files:
            index = files.pop(INDEX_NAME)
            if storage is None:
                spread = open_share(located.label, located.files, index, served, on_fault)
            else:
                share = (0, 1) if alone else (rank, world_size)
                spread = open_spread(located.label, located.files, index, located.info.world_size, *share, without)
        failpoint("restore.read")
    except (CheckpointError, OSError) as error:
        return None, error if isinstance(error, CheckpointError) else StorageUnreachable(str(error))
    point = LoadedCheckpoint(
        located.label,
        step=located.info.step,
        world_size=located.info.world_size,
        samples_consumed=located.info.samples_consumed,
        files=files,
        path=located.path,
        private=private,
        scratch=scratch,
        spread=spread,
        is_snapshot=storage is None,
        rank=rank,
    )
    return point, None


def read_checkpoint(
    storage: Storage,
    step: int,
    rank: int,
    world_size: int,
    *,
    private: bool = True,
    alone: bool = True,
    without: Collection[str] = (),
) -> LoadedCheckpoint:
    """Read a checkpoint on one rank, verified.

    Args:
        storage: Where it is.
        step: Its step.
        rank: Number of this rank.
        world_size: Number of all ranks.
        private: Whether tensors must be the reader's own; see `LoadedCheckpoint`.
        alone: Whether this rank verifies all shards; otherwise all ranks do so together, and tell each other.
        without: Files that nobody will read.

    Raises:
        InvalidCheckpoint: It is not whole, or was altered.
        StorageUnreachable: It cannot be read now.
    """
    buffers = BufferCache(except_for="")
    point, problem = read_verified(
        storage,
        step,
        rank,
        world_size,
        private=private,
        buffers=buffers,
        shares=DigestShares(),
        alone=alone,
        without=without,
    )
    if problem is not None:
        raise problem
    assert point is not None
    return point


def _locate(storage: Storage | None, source: OfferedSnapshot | int) -> _Located:
    if not isinstance(source, int):
        files: dict[str, Recorded] = {name: (view, source.digests[name]) for name, view in source.files.items()}
        return _Located(f"the snapshot of step {source.info.step} in memory", source.info, files)
    assert storage is not None
    path, label = storage.directory(source), storage.describe(source)
    manifest = storage.read_manifest(source)
    files = recorded_files(storage, manifest)
    return _Located(label, manifest.info, files, path)
