"""Makes one snapshot in the copy thread: lays the state out, compares replicas, copies, hands over to the agent."""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from checkpointing.agent.client import AgentClient
from checkpointing.agent.events import SnapshotSkipped
from checkpointing.agent.protocol import Refusal
from checkpointing.commit.replicated_save import ReplicatedSave, is_split
from checkpointing.commit.sharded_save import ShardedSave
from checkpointing.errors import NonFinite, ReplicasDrifted
from checkpointing.files import file_images, sharding
from checkpointing.files.file_images import Extent, FileImage, PlacedFile, blob_image
from checkpointing.files.safetensors_files import safetensors_image
from checkpointing.files.shard_layout import LocalWriters, ShardLayout
from checkpointing.files.torch_files import TorchFileLayout, torch_bytes
from checkpointing.format.layout import MASTER_NAME, OPTIMIZER_NAME, OPTIONS_NAME, rank_state_name
from checkpointing.format.shard_index import INDEX_NAME, shard_name
from checkpointing.host.failpoints import failpoint
from checkpointing.process.pinning import Pinning
from checkpointing.process.ranks import Ranks
from checkpointing.snapshot.buddy_copies import BuddyCopies
from checkpointing.snapshot.copy_thread import Copy
from checkpointing.snapshot.direct_commit import DirectCommit
from checkpointing.snapshot.request import PendingSnapshot, SmallFile, SnapshotRequest
from checkpointing.state.captured_state import CapturedState, completed
from checkpointing.state.replicas import ReplicaComparison, differing_buffers, own_objects
from checkpointing.state.samples import is_gone, listed
from checkpointing.state.tensor_fingerprint import FINITE_TYPES, FiniteLook, SourceSum

logger = logging.getLogger("checkpointing")
# By which the ranks tell each other which small values are not finite.
_NOT_FINITE = "not-finite-"


@dataclass(frozen=True)
class _Layout:
    """The files of a snapshot.

    Attributes:
        images: All files. The further states come first, since the training thread waits for their copy.
        num_foreign: How many of the first ones are further states.
        optimizer: The optimizer's file, of which the images may have only this rank's share.
        share: The save, where the images are only this node's share of the state.
        splittable: Files that several nodes can write: large, and equal on all of them.
        guests: Names of images that only keep a place for copies of another node's shards.
        not_finite: Returns the names of buffers, and of a scaler, that hold NaN or infinity on any rank.
    """

    images: list[FileImage]
    num_foreign: int
    optimizer: FileImage
    share: ShardedSave | None = None
    splittable: tuple[str, ...] = ()
    guests: frozenset[str] = frozenset()
    not_finite: Callable[[], list[str]] = list


@dataclass(frozen=True)
class _Acquired:
    """An arena that is being filled.

    Attributes:
        placed: The files, with their places in it.
        number: Of the arena.
        buffer: Its memory.
        save: The save, where other nodes hold the same snapshot and write parts of it.
    """

    placed: list[PlacedFile]
    number: int
    buffer: memoryview
    save: ReplicatedSave | None


class SnapshotCopy:
    """Makes the snapshots of one rank; all methods run in the copy thread.

    Args:
        client: The connection to the node's agent.
        ranks: This rank, with a group that only the copy thread uses.
        direct: Commits where there is no memory for a snapshot.
        check_replicas: Whether to compare parameters and optimizer state.
        pinning: Pins what this rank copies into; None where the driver cannot.
        check_finite: Whether to refuse parameters and optimizer state that are not finite.

    Attributes:
        has_torn: Something other than an optimizer has changed the state during a copy.
        buddies: Copies each node's shards to another one; None where that is not wanted, or there is no memory for it.
    """

    def __init__(
        self,
        client: AgentClient,
        ranks: Ranks,
        direct: DirectCommit,
        *,
        check_replicas: bool,
        pinning: Pinning | None,
        check_finite: bool = True,
    ) -> None:
        self._check_finite = check_finite
        self._client, self._ranks, self._direct, self._pinning = client, ranks, direct, pinning
        self.buddies: BuddyCopies | None = None
        self._replicas = ReplicaComparison(ranks)
        self._check_replicas = check_replicas
        self._shards = ShardLayout(ranks)
        self._writers = LocalWriters(ranks)
        self._layouts: dict[str, TorchFileLayout] = {}
        self.has_torn = self._has_warned_of_drift = False

    def reserve(self, nbytes: int, copy: Copy) -> None:
        """Have the agent's memory for snapshots made and mapped, and for copies of another node's shards."""
        copy.copied()
        TorchFileLayout.warm_up()
        if self.buddies is None:
            self._client.reserve(nbytes)
        elif not all(self._ranks.gather(self._client.reserve(nbytes, nbytes))):
            self._give_buddies_up()

    def make(
        self, pending: PendingSnapshot, state: CapturedState, static_files: Mapping[str, bytes], copy: Copy
    ) -> None:
        """Make the snapshot of a captured state; `copy` tells the training thread how far this has come."""
        cpu_began = time.thread_time()
        request = pending.request
        state = completed(state, self._ranks)
        layout = self._lay_out(pending, state, static_files)
        if not self._is_one_state(pending, state, layout):
            copy.copied()
            return
        acquired = self._acquire(request, layout)
        if isinstance(acquired, Refusal):
            pending.was_staged = False
            if acquired is Refusal.NO_MEMORY and request.commit and self._ranks.is_first:
                self._direct.commit(request, layout.images, copy.device)
            copy.copied()
            return
        failpoint("snapshot.copying")
        names = _finite_storages(state) if self._check_finite else {}
        sums = SourceSum({address: kind for address, (_, kind) in names.items()})
        extents = self._copy_share(pending, acquired.placed, layout.num_foreign, acquired.buffer, copy, sums)
        copy.copied_s = time.thread_time() - cpu_began
        copy.copied(state.changed)
        why_not = self._why_unusable(pending, copy, extents, acquired.buffer)
        not_finite = list[str]()
        if why_not is None:
            not_finite = [names[address][0] for address in sums.not_finite()] + layout.not_finite()
        if not_finite:
            pending.was_staged = False
        if layout.share is not None:
            why_not = self._everyones_reason(pending, why_not, not_finite)
        if why_not is None:
            self._stage(request, layout, acquired, sums, not_finite)
        else:
            self._client.abandon(request.step, acquired.number, why_not)
        # The rank that finds it ends by itself: others may have no memory for the snapshot, and not be here.
        if not_finite:
            raise NonFinite(request.step, not_finite)

    def _is_one_state(self, pending: PendingSnapshot, state: CapturedState, layout: _Layout) -> bool:
        """Compare the replicas; return whether there is one state of one step to be copied.

        Raises:
            ReplicasDrifted: They differ, and a commit was asked for.
        """
        try:
            changed = self._num_changed(pending, state, layout)
        except ReplicasDrifted as error:
            if pending.request.commit:
                raise
            self._skip_drifted(pending, error)
            return False
        if changed:
            self._drop_torn(pending, f"{changed} tensors were")
        return not changed

    def _skip_drifted(self, pending: PendingSnapshot, error: ReplicasDrifted) -> None:
        """Skip a snapshot that nobody has asked for: ranks that are averaged from time to time differ in between."""
        pending.was_staged = False
        if self._ranks.is_first:
            self._client.announce(SnapshotSkipped(step=pending.request.step, reason="the ranks hold different values"))
            if not self._has_warned_of_drift:
                logger.warning("no snapshot in memory, and none while that is so, of %s", error)
        self._has_warned_of_drift = True

    def _num_changed(self, pending: PendingSnapshot, state: CapturedState, layout: _Layout) -> int:
        """Compare the replicas; return how many tensors have changed meanwhile, so that nothing was compared.

        Raises:
            ReplicasDrifted: They differ.
        """
        if self._ranks.group is None or not self._check_replicas:
            return 0
        count_changed = state.changed if pending.overlapped else int
        changed = self._replicas.check_equal(pending.request.step, state, layout.optimizer, count_changed)
        if state.parts and not changed:
            changed = self._replicas.check_parts_equal(pending.request.step, state, count_changed)
        return changed

    def _acquire(self, request: SnapshotRequest, layout: _Layout) -> _Acquired | Refusal:
        """Have an arena for the files, on all nodes or on none where these are spread."""
        placed, nbytes = file_images.place(layout.images)
        acquired = self._client.acquire(request.step, nbytes, wait=request.wait, is_urgent=request.commit)
        save = None
        if layout.share is not None:
            acquired = self._agreed(request.step, acquired)
            if acquired is Refusal.NO_MEMORY and self.buddies is not None:
                self._give_buddies_up()
                placed, nbytes = file_images.place(
                    [image for image in layout.images if image.name not in layout.guests]
                )
                acquired = self._agreed(request.step, self._client.acquire(request.step, nbytes, wait=request.wait))
        elif request.commit and layout.splittable:
            save = self._agreed_save(layout.splittable, has_memory=not isinstance(acquired, Refusal))
        return acquired if isinstance(acquired, Refusal) else _Acquired(placed, *acquired, save)

    def _everyones_reason(self, pending: PendingSnapshot, why_not: str | None, not_finite: Sequence[str]) -> str | None:
        """Return why some node cannot use its share of a snapshot that is spread; None if all can."""
        # Of what is spread over nodes, none has enough for a post-mortem.
        why_not = f"it is not finite: {listed(not_finite)}" if not_finite else why_not
        why_not = next(filter(None, self._ranks.gather(why_not)), None)
        pending.was_staged = why_not is None
        return why_not

    def _stage(
        self, request: SnapshotRequest, layout: _Layout, acquired: _Acquired, sums: SourceSum, not_finite: Sequence[str]
    ) -> None:
        """Hand the copied snapshot to the agent, and have copies of shards made on other nodes."""
        ranks, placed, buffer = self._ranks, acquired.placed, acquired.buffer
        literals = file_images.placed_literals(placed) if ranks.local_rank == 0 else []
        file_images.copy_literals(literals, buffer)
        failpoint("snapshot.copied")
        # What training waits for is about to be in storage, and to be the last.
        is_last = request.commit and request.wait
        buddies = self.buddies if layout.guests and not is_last and not not_finite else None
        self._client.staged(
            request.step,
            acquired.number,
            [
                (file.image.name, file.offset, file.image.nbytes)
                for file in placed
                if file.image.name not in layout.guests
            ],
            ranks.world_size,
            request.samples_consumed,
            request.retention,
            metrics=request.metrics,
            commit=request.commit,
            save=layout.share or acquired.save,
            receives=buddies is not None,
            words=sums.total(buffer, literals),
            not_finite=not_finite,
        )
        if buddies is not None:
            own, guest = (
                next(file for file in placed if file.image.name == shard_name(rank))
                for rank in (ranks.rank, buddies.guest)
            )
            buddies.exchange(
                request.step,
                acquired.number,
                buffer[own.offset : own.offset + own.image.nbytes],
                buffer[guest.offset : guest.offset + guest.image.nbytes],
                guest.offset,
            )

    def _look_at_small(self, state: CapturedState) -> Callable[[], list[str]]:
        """Begin to look at this rank's buffers and scaler; return what returns the names of those that are not finite.

        The copy thread waits for the device only once it asks for them.
        """
        if not self._check_finite:
            return list
        buffers = {**(state.model if self._ranks.is_first else {}), **state.own_buffers}
        look = FiniteLook({name: buffers[name] for name in sorted(state.finite) if name in buffers})
        is_broken = state.scale is not None and not 0 < state.scale < math.inf
        return lambda: [*look.names(), *([f"scaler: a scale of {state.scale:g}"] if is_broken else [])]

    def _give_buddies_up(self) -> None:
        """Keep no copies of other nodes' shards any more: some node has no memory for them."""
        if self._ranks.is_first:
            logger.warning(
                "there is no memory for copies of other nodes' shards (checkpoint.memory_limit): if a node is lost, "
                "training resumes from the newest checkpoint in storage"
            )
        assert self.buddies is not None
        self.buddies.close()
        self.buddies = None

    def close(self) -> None:
        """End what still runs in the background, on all ranks."""
        if self.buddies is not None:
            self.buddies.close()

    def _agreed_save(self, files: tuple[str, ...], *, has_memory: bool) -> ReplicatedSave | None:
        """Return which of the nodes that hold the snapshot this one is; None where it is the only one.

        Args:
            files: What they can write together.
            has_memory: Whether this node has memory for it.
        """
        ranks = self._ranks
        if ranks.local_world_size == ranks.world_size:
            return None
        first = ranks.rank - ranks.local_rank
        said = ranks.gather((first, has_memory, uuid.uuid4().hex[:12]))
        return ReplicatedSave.between([(node, holds) for node, holds, _ in said], first, said[0][2], files)

    def _agreed(self, step: int, acquired: tuple[int, memoryview] | Refusal) -> tuple[int, memoryview] | Refusal:
        """Return what was acquired, if all nodes have memory for their share; otherwise why one has none."""
        refusals = self._ranks.gather(acquired if isinstance(acquired, Refusal) else None)
        refusal = next(filter(None, refusals), None)
        if refusal is None:
            return acquired
        # Once: a later message might hit the next try.
        if not isinstance(acquired, Refusal) and self._ranks.local_rank == 0:
            self._client.abandon(step, acquired[0], "another node has no memory for its share")
        return refusal

    def _lay_out(self, pending: PendingSnapshot, state: CapturedState, static_files: Mapping[str, bytes]) -> _Layout:
        """Lay the files out, and exchange the small ones with all ranks.

        Raises:
            ReplicasDrifted: The ranks lay a file out differently.
        """
        request = pending.request
        foreign = {name: self._torch_file(f"{name}.pt").image(value) for name, value in state.states.items()}
        rank, differing = self._ranks.rank, self._replicas.differing_names(state, foreign)
        own = _contents(request.own_files) | own_objects(state.small, differing, rank)
        # What is not equal on all ranks is kept for each of them.
        mine = {
            "states": {name: value for name, value in state.states.items() if name in differing},
            "buffers": {name: value for name, value in state.model.items() if name in differing},
        }
        if state.kind.has_own_buffers:
            different = differing_buffers(state.own_buffers, self._ranks)
            mine["buffers"] |= {name: value for name, value in state.own_buffers.items() if name in different}
        if any(mine.values()):
            own[rank_state_name(rank)] = torch_bytes(mine)
        images = [image for name, image in foreign.items() if name not in differing]
        num_foreign = len(images)
        images.append(safetensors_image(state.weights_name, state.model, differing))
        if state.masters:
            images.append(safetensors_image(MASTER_NAME, state.masters))
        images.append(self._torch_file(OPTIMIZER_NAME).image(state.optimizer))
        # Of buffers, rank 0's count: DDP copies them to the others before each forward pass.
        look = self._look_at_small(state)
        if self._ranks.group is not None and (names := look()):
            own[f"{_NOT_FINITE}{rank}"] = json.dumps(names).encode()
        everyones = self._replicas.gather_files(request.step, own, images)
        found = [everyones.pop(name) for name in sorted(everyones) if name.startswith(_NOT_FINITE)]
        shared = {name: data for name, data in state.small.items() if name != OPTIONS_NAME}
        small = {**static_files, **shared, **_contents(request.shared_files), **everyones}
        if state.parts:
            images = [sharding.with_own_parts(image, state.parts) for image in images]
            if not state.is_spread:
                self._writers.take_turns(images)
        optimizer, share, guests = images[-1], None, dict[str, int]()
        # What is taken from each node's first rank, such as running statistics, may differ.
        splittable = tuple(image.name for image in images if is_split(image.nbytes) and not image.alone)
        if state.is_spread:
            shards, index, share = self._shards.lay_out(images[num_foreign:])
            if self.buddies is not None and share.in_memory:
                # Before the small files, which only the node's first rank lays out.
                guests = {shard_name(rank): self._shards.sizes[rank] for rank in self.buddies.guests}
            images[num_foreign:] = [*shards, *itertools.starmap(FileImage, guests.items())]
            small[INDEX_NAME] = index
        if self._ranks.local_rank == 0:
            images += [blob_image(name, data) for name, data in small.items()]
        gathered = list(dict.fromkeys(name for names in found for name in json.loads(names)))
        not_finite = look if self._ranks.group is None else lambda: gathered
        return _Layout(images, num_foreign, optimizer, share, splittable, frozenset(guests), not_finite)

    def _copy_share(
        self,
        pending: PendingSnapshot,
        placed: Sequence[PlacedFile],
        num_foreign: int,
        buffer: memoryview,
        copy: Copy,
        sums: SourceSum,
    ) -> list[Extent]:
        """Copy this rank's share of the tensors into the arena, the further states first; return the rest of it."""
        if any(is_gone(tensor) for file in placed for _, tensor in file.image.tensors):
            # Nothing can be read there.
            pending.is_gone = True
            return []
        volatile, rest = (
            file_images.shares(part, self._ranks.local_rank, self._ranks.local_world_size)
            for part in (placed[:num_foreign], placed[num_foreign:])
        )
        if copy.device.is_asynchronous and self._pinning is not None:
            extents = [(extent.offset, extent.end) for extent in volatile + rest]
            # A copy into memory that is not pinned yet says nothing about the cost of later ones.
            pending.is_typical = not self._pinning.want(buffer, extents)
        file_images.copy_tensors(volatile, buffer, copy.device)
        sums.add(volatile)
        copy.volatile_done()
        file_images.copy_tensors(rest, buffer, copy.device)
        sums.add(rest)
        if pending.samples is not None:
            pending.samples.read_again()
        return rest

    def _why_unusable(
        self, pending: PendingSnapshot, copy: Copy, extents: Sequence[Extent], buffer: memoryview
    ) -> str | None:
        """Return why what was copied is not the state of one step."""
        if pending.is_gone:
            return self._drop_torn(pending, "the memory of some tensors was released, and they were")
        if pending.overlapped and copy.changed:
            return self._drop_torn(pending, f"{copy.changed} tensors were")
        torn = pending.samples.torn(extents, buffer) if pending.samples is not None else []
        if torn:
            return self._drop_torn(pending, f"{listed(torn)} were")
        if pending.overlapped and copy.is_doubtful:
            pending.was_staged = False
            return "during the copy a step ended in which no optimizer stepped: a skipped step, or a CUDA graph"
        return None

    def _drop_torn(self, pending: PendingSnapshot, what: str) -> str:
        """Drop a snapshot whose state changed while it was copied or compared; return the reason."""
        self.has_torn = True
        pending.was_staged = False
        reason = (
            f"{what} changed in place between the snapshot and the next optimizer step; from now "
            "on training waits for the copy"
        )
        logger.warning("the snapshot of step %d is dropped: %s", pending.request.step, reason)
        return reason

    def _torch_file(self, name: str) -> TorchFileLayout:
        return self._layouts.setdefault(name, TorchFileLayout(name))


def _finite_storages(state: CapturedState) -> dict[int, tuple[str, torch.dtype]]:
    """Return name and type of what must be finite, by the address of its storage; what is frozen may hold anything."""
    found: dict[int, tuple[str, torch.dtype]] = {}
    for name, tensor in state.sources:
        is_frozen = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
        if tensor.dtype in FINITE_TYPES and tensor.numel() and not is_frozen:
            found[tensor.untyped_storage().data_ptr()] = (name, tensor.dtype)
    return found


def _contents(files: Mapping[str, SmallFile]) -> dict[str, bytes]:
    return {name: data if isinstance(data, bytes) else data() for name, data in files.items()}
