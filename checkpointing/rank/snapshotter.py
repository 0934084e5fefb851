"""Makes snapshots: lays a step's state out, compares replicas, copies this rank's share, hands over to the agent."""

from __future__ import annotations

import collections
import functools
import hashlib
import logging
import mmap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.agent.client import AgentClient, Refusal
from checkpointing.commit import StagedFile, commit_snapshot
from checkpointing.digest import RunningDigest, digesting
from checkpointing.errors import CheckpointError, ReplicasDrifted
from checkpointing.failpoints import failpoint
from checkpointing.layout import OPTIMIZER_NAME, rank_state_name
from checkpointing.manifest import SnapshotInfo
from checkpointing.rank import device as devices
from checkpointing.rank import file_images, sharding
from checkpointing.rank.cadence import CostModel
from checkpointing.rank.copy_thread import Copy, Stager
from checkpointing.rank.device import Device
from checkpointing.rank.file_images import FileImage, blob_image
from checkpointing.rank.fingerprint import fingerprint
from checkpointing.rank.pinning import Pinning
from checkpointing.rank.safetensors_files import safetensors_image
from checkpointing.rank.torch_files import TorchFileLayout, torch_bytes
from checkpointing.rank.train_state import State, Tracked
from checkpointing.retention import Retention
from checkpointing.tiers import Tiers

logger = logging.getLogger("checkpointing")

# A small file of a rank: its bytes, or what makes them beside training.
SmallFile = bytes | Callable[[], bytes]

_WINDOW_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class Ranks:
    """This process among the others. `group`: gloo, used by the copying thread alone; None for one process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class Request:
    """What `Snapshotter.take` is asked for; see `CheckpointManager.save`."""

    step: int
    samples_consumed: int
    own_files: Mapping[str, SmallFile]
    shared_files: Mapping[str, SmallFile]
    retention: Retention
    metrics: Mapping[str, float]
    wait: bool
    commit: bool


@dataclass
class _Pending:
    """The snapshot that is not settled yet, and what has become of it."""

    request: Request
    overlapped: bool
    has_outcome: bool = True
    cost_known: bool = False
    is_typical: bool = True


class Snapshotter:
    """One per rank; methods are called by the training thread.

    Attributes:
        costs: what snapshots cost here.
        last_step: newest step of which a snapshot was asked for and not refused; -1 before the first.
        committing_step: newest step that the agent was asked to commit.
        direct_error: why the last commit without an arena failed.
        stall_s: seconds that training has waited for snapshots.
    """

    def __init__(
        self,
        client: AgentClient,
        tiers: Tiers,
        ranks: Ranks,
        *,
        overlap: bool | None,
        check_replicas: bool,
        device_of: Callable[[Iterable[torch.Tensor]], Device] = devices.of,
        pinning: Pinning | None = None,
    ) -> None:
        """`pinning`: where the driver can be given memory to copy into."""
        self._client, self._tiers, self._ranks = client, tiers, ranks
        self._device_of, self._pinning = device_of, pinning
        self._overlap, self._check_replicas = overlap, check_replicas
        self._layouts: dict[str, TorchFileLayout] = {}
        self._stager = Stager(on_gate=self._note_gate)
        self._pending: _Pending | None = None
        self._captured = False
        # Something changes the state outside the optimizer: never copy beside training again.
        self._torn = False
        # In the last step, an optimizer was seen to pass the gate (or none has ended yet).
        self._gate_works = True
        self._step_at = self._gate_at = 0.0
        self._settled_stall_s = 0.0
        self.costs = CostModel()
        self.last_step = -1
        self.committing_step: int | None = None
        self.direct_error: str | None = None

    def reserve(self, nbytes: int) -> None:
        """Beside the first step: memory, its page faults and its pinning are paid before the first snapshot."""

        def work(copy: Copy) -> None:
            copy.copied()
            TorchFileLayout.warm_up()
            self._client.reserve(nbytes)

        self.settle()
        self._stager.submit(work)

    def take(self, tracked: Tracked, request: Request, static_files: Mapping[str, bytes]) -> None:
        """Snapshot the tracked state; returns when training may go on."""
        # What is waited for here is the price of what went before: the last snapshot, or memory for the first one.
        self.settle()
        began = time.perf_counter()
        overlapped = self.costs.overlap if self._overlap is None else self._overlap
        overlapped = overlapped and not self._torn and self._gate_works and tracked.has_gate
        pending = self._pending = _Pending(request, overlapped)
        state = tracked.capture(check=not self._captured)
        self._captured = True
        work = functools.partial(self._make, pending, state, dict(static_files))
        copy = self._stager.submit(work, self._device_of(state.tensors))
        self.last_step = request.step
        if not overlapped:
            copy.hold()
        elif state.states:
            copy.hold_volatile()
        self._step_at = time.perf_counter()
        copy.blocked_s += self._step_at - began

    def settle(self) -> None:
        """Wait until the last snapshot is handed over.

        Raises:
            CheckpointError: it failed.
        """
        pending, self._pending = self._pending, None
        copy = self._stager.settle()
        if copy is not None:
            self._settled_stall_s += copy.blocked_s
        if pending is None:
            return
        if not pending.has_outcome:
            self.last_step = -1
        elif pending.request.commit:
            self.committing_step = pending.request.step

    @property
    def stall_s(self) -> float:
        current = self._stager.current
        return self._settled_stall_s + (current.blocked_s if current is not None else 0.0)

    def end_of_step(self) -> None:
        """A step has ended: learn from it what snapshots cost."""
        now = time.perf_counter()
        compute_s = max((self._gate_at or now) - self._step_at, 0.0)
        self._gate_works = self._gate_at > 0
        self._gate_at, self._step_at = 0.0, now
        pending, copy = self._pending, self._stager.current
        if copy is not None:
            copy.end_step()
        if pending is None or pending.cost_known or copy is None:
            self.costs.plain_step(compute_s)
            return
        pending.cost_known = True
        if not (pending.has_outcome and pending.is_typical) or not compute_s or not copy.enqueued.is_set():
            return
        cost = self.costs.snapshot(
            blocked_s=copy.blocked_s, compute_s=compute_s, copy_s=copy.copied_s, overlapped=pending.overlapped
        )
        if self._ranks.rank == 0:
            self._client.announce(
                {
                    "event": "snapshot_cost",
                    "step": pending.request.step,
                    "blocked_s": round(copy.blocked_s, 5),
                    "copy_s": round(copy.copied_s, 5),
                    "cost_s": round(cost, 5),
                    "overlapped": pending.overlapped,
                }
            )

    @property
    def is_preparing(self) -> bool:
        """Memory is being reserved or pinned: a snapshot would cost more than later ones."""
        copy = self._stager.current
        reserving = copy is not None and self._pending is None and not copy.finished.is_set()
        return reserving or (self._pinning is not None and self._pinning.is_busy)

    @property
    def optimizer_has_stepped(self) -> bool:
        """An optimizer has stepped since the last step ended."""
        return self._gate_at > 0

    def close(self) -> None:
        """End the threads; the last snapshot must be settled."""
        self._stager.close()
        if self._pinning is not None:
            self._pinning.close()

    def _note_gate(self) -> None:
        """An optimizer is about to step: forward and backward are done."""
        if not self._gate_at:
            self._gate_at = time.perf_counter()

    # -- in the copying thread -----------------------------------------------------------------------------------

    def _make(
        self,
        pending: _Pending,
        state: State,
        static_files: dict[str, bytes],
        copy: Copy,
    ) -> None:
        cpu_began = time.thread_time()
        request, ranks = pending.request, self._ranks
        # Foreign state first: the training thread waits for it.
        foreign = {name: self._layout(f"{name}.pt").image(value) for name, value in state.states.items()}
        differing = self._differing(state, foreign)
        own = _made(request.own_files)
        if differing:
            # What is not equal on all ranks is kept for each of them.
            mine = {
                "states": {name: value for name, value in state.states.items() if name in differing},
                "buffers": {name: value for name, value in state.model.items() if name in differing},
            }
            own[rank_state_name(ranks.rank)] = torch_bytes(mine)
        images = [image for name, image in foreign.items() if name not in differing]
        num_foreign = len(images)
        images.append(safetensors_image(state.weights_name, state.model, differing))
        images.append(self._layout(OPTIMIZER_NAME).image(state.optimizer))
        everyone = self._gather(pending, own, images)
        small = {**static_files, **state.small, **_made(request.shared_files), **everyone}
        if ranks.local_rank == 0:
            images += [blob_image(name, data) for name, data in small.items()]
        if state.parts:
            images = [sharding.take_over(image, state.parts) for image in images]
        placed, nbytes = file_images.place(images)
        if ranks.group is not None and self._check_replicas:
            whole = (name for name in state.model if name in state.parameters)
            replicated = {
                name: state.model[name] for name in whole if not sharding.is_stand_in(state.model[name], state.parts)
            }
            if not self._compare_replicas(pending, state, replicated, images[num_foreign + 1]):
                copy.copied()
                return
        acquired = self._client.acquire(request.step, nbytes, wait=request.wait)
        if isinstance(acquired, Refusal):
            pending.has_outcome = False
            if acquired is Refusal.NO_MEMORY and request.commit and ranks.rank == 0:
                self._commit_directly(pending, images, copy.device)
            copy.copied()
            return
        number, buffer = acquired
        failpoint("snapshot.copying")
        volatile, rest = (
            file_images.shares(part, ranks.local_rank, ranks.local_world_size)
            for part in (placed[:num_foreign], placed[num_foreign:])
        )
        if copy.device.is_asynchronous and self._pinning is not None:
            extents = [(offset, offset + tensor.numel()) for offset, tensor in volatile + rest]
            # What is copied into memory that is not pinned yet says nothing of what later snapshots cost.
            pending.is_typical = not self._pinning.want(buffer, extents)
        file_images.copy_tensors(volatile, buffer, copy.device)
        copy.volatile_done()
        file_images.copy_tensors(rest, buffer, copy.device)
        copy.copied_s = time.thread_time() - cpu_began
        copy.copied(state.changed)
        if pending.overlapped and copy.changed:
            self._client.abandon(request.step, number, self._note_torn(pending, copy.changed))
            return
        if pending.overlapped and copy.is_doubtful:
            pending.has_outcome = False
            reason = "while it was copied, a step ended in which no optimizer stepped: one that was skipped, or a graph"
            self._client.abandon(request.step, number, reason)
            return
        if ranks.local_rank == 0:
            file_images.copy_literals(placed, buffer)
        failpoint("snapshot.copied")
        self._client.staged(
            request.step,
            number,
            [(file.image.name, file.offset, file.image.nbytes) for file in placed],
            ranks.world_size,
            request.samples_consumed,
            request.retention,
            metrics=request.metrics,
            commit=request.commit,
        )

    def _note_torn(self, pending: _Pending, changed: int) -> str:
        """What was copied, or compared, is not the state of one step; returns why."""
        self._torn = True
        pending.has_outcome = False
        reason = (
            f"{changed} tensors were changed in place between the snapshot and the next optimizer step; from now "
            "on training waits for the copy"
        )
        logger.warning("the snapshot of step %d is dropped: %s", pending.request.step, reason)
        return reason

    def _layout(self, name: str) -> TorchFileLayout:
        return self._layouts.setdefault(name, TorchFileLayout(name))

    def _gather(self, pending: _Pending, own: dict[str, bytes], images: Sequence[FileImage]) -> dict[str, bytes]:
        """All ranks' own files.

        Raises:
            ReplicasDrifted: the ranks lay a file out in different ways, so that each would write its part elsewhere.
        """
        if self._ranks.group is None:
            return own
        layouts = file_images.layout_digest(images)
        everyone: list[Any] = [None] * self._ranks.world_size
        dist.all_gather_object(everyone, (own, layouts), group=self._ranks.group)
        for name in layouts:
            who = _who_differs([[theirs.get(name)] for _, theirs in everyone])
            if who is not None:
                raise ReplicasDrifted(
                    f"step {pending.request.step}: {who} in the shapes or names of what {name} holds. No checkpoint is "
                    "made of this state; resume from the one before. Look for code that gives the ranks different "
                    "optimizer options, parameters or further states."
                )
        return {name: data for files, _ in everyone for name, data in files.items()}

    def _differing(self, state: State, foreign: Mapping[str, FileImage]) -> frozenset[str]:
        """Names of buffers and of further states that are not equal on all ranks; called by all of them."""
        if self._ranks.group is None:
            return frozenset()
        buffers = {
            name: tensor
            for name in sorted(state.buffers)
            if not sharding.is_stand_in(tensor := state.model[name], state.parts)
        }
        sums = fingerprint(t.contiguous().reshape(-1).view(torch.uint8) for t in buffers.values()).tolist()
        for image in foreign.values():
            # One number for each, as their structure may differ, too.
            tensors = fingerprint(tensor for _, tensor in image.tensors).tolist()
            text = repr((tensors, image.nbytes)).encode() + b"".join(data for _, data in image.literals)
            sums.append(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), signed=True) >> 1)
        if not sums:
            return frozenset()
        mine = torch.tensor(sums, dtype=torch.int64)
        extremes = torch.stack([mine, -mine])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._ranks.group)
        names = [*buffers, *foreign]
        return frozenset(names[number] for number in (extremes[0] != -extremes[1]).nonzero().flatten().tolist())

    def _compare_replicas(
        self, pending: _Pending, state: State, parameters: Mapping[str, torch.Tensor], optimizer: FileImage
    ) -> bool:
        """All ranks together. False where some rank has changed its state meanwhile, so that nothing can be said.

        Raises:
            ReplicasDrifted: they do not hold equal state.
        """
        names = [*parameters, *(f"the optimizer's state (byte {offset})" for offset, _ in optimizer.tensors)]
        flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in parameters.values()]
        mine = fingerprint([*flat, *(tensor for _, tensor in optimizer.tensors)])
        extremes = torch.stack([mine, -mine])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._ranks.group)
        differing = (extremes[0] != -extremes[1]).nonzero().flatten().tolist()
        if differing:
            everyone: list[Any] = [None] * self._ranks.world_size
            changed = state.changed() if pending.overlapped else 0
            dist.all_gather_object(everyone, (changed, mine[differing].tolist()), group=self._ranks.group)
            most = max(changed for changed, _ in everyone)
            if most:
                self._note_torn(pending, most)
                return False
            who = _who_differs([sums for _, sums in everyone])
            raise ReplicasDrifted(
                f"step {pending.request.step}: {who} in {len(differing)} of {len(names)} tensors, first in "
                f"{names[differing[0]]}. No checkpoint is made of this state; go on from the one before. If it happens "
                "again, look for code that changes parameters on one rank only, or for faulty memory."
            )
        return True

    def _commit_directly(self, pending: _Pending, images: Sequence[FileImage], device: Device) -> None:
        """Without memory for a snapshot rank 0 writes the files itself, while the optimizer waits."""
        began, request, client = time.monotonic(), pending.request, self._client
        tier = {"tier": self._tiers.name(self._tiers.first)}
        if any(image.own for image in images):
            self.direct_error = (
                "there is no memory for a snapshot, and of sharded state no rank can write all: set a larger "
                "checkpoint.memory_limit"
            )
            client.announce({"event": "commit_failed", "step": request.step, **tier, "error": self.direct_error})
            return
        info = SnapshotInfo(
            client.run_id,
            client.attempt,
            request.step,
            self._ranks.world_size,
            request.samples_consumed,
            request.metrics,
        )
        storage = self._tiers.first
        window = memoryview(mmap.mmap(-1, _WINDOW_BYTES))
        files = []
        for image in images:
            digest = RunningDigest()
            pieces = file_images.pieces(image, window, device)
            files.append(StagedFile(image.name, digesting(pieces, digest), digest.result))
        try:
            manifest = commit_snapshot(storage, info, files)
        except CheckpointError as error:
            self.direct_error = str(error)
            client.announce({"event": "commit_failed", "step": request.step, **tier, "error": str(error)})
            return
        self.direct_error = None
        duration = round(time.monotonic() - began, 4)
        event = {"event": "committed", "step": request.step, **tier, "nbytes": manifest.total_bytes}
        client.announce({**event, "duration_s": duration, "cpu_s": duration})
        client.prune(request.retention)


def _who_differs(sums: Sequence[Sequence[object]]) -> str | None:
    """The ranks that are not as most are, in words; None where all are alike. `sums` are all ranks', by rank."""
    counted = collections.Counter(map(tuple, sums))
    if len(counted) == 1:
        return None
    usual, number = counted.most_common(1)[0]
    odd = [str(rank) for rank, own in enumerate(sums) if tuple(own) != usual]
    if 2 * number <= len(sums):
        return f"the {len(sums)} ranks hold different values"
    one = len(odd) == 1
    return f"rank{'' if one else 's'} {', '.join(odd)} hold{'s' if one else ''} other values than the others"


def _made(files: Mapping[str, SmallFile]) -> dict[str, bytes]:
    return {name: data if isinstance(data, bytes) else data() for name, data in files.items()}
