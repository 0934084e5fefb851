"""Takes snapshots: decides how each is copied, has it made during training, and learns from its cost."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping

import torch

from checkpointing.agent.client import AgentClient
from checkpointing.agent.events import SnapshotCost, SnapshotSkipped
from checkpointing.commit.tiers import Tiers
from checkpointing.process import device as devices
from checkpointing.process.device import Device
from checkpointing.process.pinning import Pinning
from checkpointing.process.ranks import Ranks
from checkpointing.snapshot.buddy_copies import BuddyCopies, has_buddies
from checkpointing.snapshot.cadence import CostModel
from checkpointing.snapshot.copy_thread import Copy, CopyThread
from checkpointing.snapshot.direct_commit import DirectCommit
from checkpointing.snapshot.request import PendingSnapshot, SnapshotRequest
from checkpointing.snapshot.snapshot_copy import SnapshotCopy
from checkpointing.state.captured_state import CapturedState
from checkpointing.state.samples import Sampler, listed
from checkpointing.state.train_state import TrainState

logger = logging.getLogger("checkpointing")

# Reserving less takes no longer than a step or two.
_MUCH_BYTES = 1 << 30


class SnapshotSchedule:
    """Takes the snapshots of one rank; the training thread calls all methods.

    Args:
        client: The connection to the node's agent.
        tiers: Where checkpoints are kept.
        ranks: This rank, with a group that only the copy thread uses.
        overlap: Whether to copy during training; None chooses by measured cost.
        check_replicas: Whether to compare the ranks' parameters and optimizer state before each snapshot.
        check_finite: Whether to refuse parameters and optimizer state that are not finite.
        device_of: Returns the device that holds given tensors.
        pinning: Pins what this rank copies into; None where the driver cannot.
        buddy_copies: Whether each node keeps a copy of another one's shards, where no node holds all of the state.
        waiting: Returns a context in which an optimizer's step waits for a copy.

    Attributes:
        costs: What snapshots cost here.
        last_step: Newest step whose snapshot was requested and not refused; -1 before the first.
        last_is_committed: Whether that snapshot is to be committed, or is already.
        committing_step: Newest step that the agent was asked to commit.
        is_spread: Whether some node does not hold all of the model, as all ranks have agreed; None before.
    """

    def __init__(
        self,
        client: AgentClient,
        tiers: Tiers,
        ranks: Ranks,
        *,
        overlap: bool | None,
        check_replicas: bool,
        check_finite: bool = True,
        device_of: Callable[[Iterable[torch.Tensor]], Device] = devices.of,
        pinning: Pinning | None = None,
        buddy_copies: bool = False,
        waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._client, self._ranks, self._pinning = client, ranks, pinning
        self._device_of, self._overlap = device_of, overlap
        self._direct = DirectCommit(client, tiers, ranks.world_size)
        self._maker = SnapshotCopy(
            client, ranks, self._direct, check_replicas=check_replicas, pinning=pinning, check_finite=check_finite
        )
        self._buddy_copies = buddy_copies
        self._copy_thread = CopyThread(on_optimizer_step=self._note_optimizer_step, waiting=waiting)
        self._pending: PendingSnapshot | None = None
        self._readable_kinds: set[object] = set()
        self._sampler, self._has_warned = Sampler(), False
        # While much memory may still be being reserved: this rank, with the training thread's group.
        self._reserving: Ranks | None = None
        # In the last step, an optimizer was seen to pass the pre-step barrier, or no step has ended yet.
        self._barrier_works = True
        self._step_at = self._barrier_at = 0.0
        self._settled_stall_s = 0.0
        # Settled, but the device may still have to pass the marks by which they are measured.
        self._unmeasured: list[tuple[PendingSnapshot | None, Copy]] = []
        self.costs = CostModel()
        self.last_step, self.last_is_committed = -1, False
        self.committing_step: int | None = None
        self.is_spread: bool | None = None

    @property
    def direct_error(self) -> str | None:
        """Why the last commit without an arena failed."""
        return self._direct.error

    @property
    def direct_step(self) -> int:
        """Newest step that was committed without an arena, by this rank; -1 before the first."""
        return self._direct.step

    def prepare(self, train_state: TrainState, ranks: Ranks) -> None:
        """Agree with all ranks on how the state is shared, and have memory made and mapped during the first step.

        The first snapshot then need not pay for that.

        Args:
            train_state: What will be snapshotted.
            ranks: This rank, with a group that the training thread uses.
        """
        local_world_size = ranks.local_world_size
        kind = train_state.kind
        if kind.is_cut:
            # Not known to each rank alone: its own mesh may be within a node where another's is not.
            self.is_spread = any(ranks.gather(kind.is_spread(local_world_size)))
        nbytes = train_state.expected_bytes(local_world_size, is_spread=bool(self.is_spread))
        if self._pinning is not None:
            self._pinning.device_index = train_state.device_index
        self._reserving = ranks if any(ranks.gather(nbytes >= _MUCH_BYTES)) else None
        self.settle()
        if self._buddy_copies and self.is_spread and self._maker.buddies is None and has_buddies(ranks):
            self._maker.buddies = BuddyCopies(self._client, ranks.with_new_group())
        self._copy_thread.submit(functools.partial(self._maker.reserve, nbytes))

    def take(self, train_state: TrainState, request: SnapshotRequest, static_files: Mapping[str, bytes]) -> None:
        """Snapshot the state; return when training may go on.

        A snapshot that is not to be committed is skipped while much memory is being reserved and pinned, which takes
        about 0.4 s per GB: training need not wait for that.

        Raises:
            CheckpointError: The previous snapshot failed, or the state cannot be saved.
        """
        if self._reserving is not None:
            if not request.commit and any(self._reserving.gather(self.is_preparing)):
                if self._ranks.is_first:
                    reason = "memory for snapshots is being made ready"
                    self._client.announce(SnapshotSkipped(step=request.step, reason=reason))
                return
            self._reserving = None
        # This wait is part of the previous snapshot's cost, or of reserving memory for the first one.
        self.settle()
        began = time.perf_counter()
        overlapped = self.costs.overlap if self._overlap is None else self._overlap
        overlapped = overlapped and not self._maker.has_torn and self._barrier_works and train_state.has_step_hook
        pending = self._pending = PendingSnapshot(request, overlapped)
        state = train_state.capture(
            readable=self._readable_kinds, local_world_size=self._ranks.local_world_size, is_spread=self.is_spread
        )
        pending.samples = self._sampler.hand_over(state.sources)
        work = functools.partial(self._make, pending, state, dict(static_files))
        copy = self._copy_thread.submit(work, self._device_of(state.tensors), at_barrier=pending.look_again)
        self.last_step, self.last_is_committed = request.step, request.commit
        if not overlapped:
            copy.hold()
        elif state.states:
            copy.hold_volatile()
        self._step_at = time.perf_counter()
        copy.blocked_s += self._step_at - began

    def _make(
        self, pending: PendingSnapshot, state: CapturedState, static_files: Mapping[str, bytes], copy: Copy
    ) -> None:
        """Make a snapshot, and prepare the next one; runs in the copy thread."""
        self._maker.make(pending, state, static_files, copy)
        self._sampler.prepare_next()

    def settle(self) -> None:
        """Wait until the last snapshot is handed over.

        Raises:
            CheckpointError: It failed.
        """
        pending, self._pending = self._pending, None
        copy = self._copy_thread.settle()
        if copy is not None:
            if pending is not None and self.costs.snapshot_s is None:
                # Until the first cost is known, `auto` would snapshot each step.
                copy.await_measured()
            self._unmeasured.append((pending, copy))
            self._learn_settled()
        if pending is None:
            return
        self._warn_of_lost_writes(pending)
        if not pending.was_staged:
            self.last_step = -1
        elif pending.request.commit:
            self.committing_step = pending.request.step

    def _warn_of_lost_writes(self, pending: PendingSnapshot) -> None:
        """Say once what was changed after the state was handed over, and still was when the optimizer stepped."""
        look, pending.look, pending.samples = pending.look, None, None
        changed = look.changed() if look is not None and pending.was_staged and not self._has_warned else []
        if changed:
            self._has_warned = True
            logger.warning(
                "after step %d was saved, and before the optimizer stepped again, something else changed %s: no "
                "checkpoint of that step has this, and a resume loses it, unless the same code runs again. "
                "Change weights before manager.step, or, in a Trainer's callback, in on_optimizer_step",
                pending.request.step,
                listed(changed),
            )

    @property
    def stall_s(self) -> float:
        """Seconds that training has waited for snapshots."""
        current = self._copy_thread.current
        copies = [copy for _, copy in self._unmeasured] + ([current] if current is not None else [])
        return self._settled_stall_s + sum(copy.waited_s for copy in copies)

    def end_of_step(self) -> None:
        """Learn from a step that has ended what snapshots cost."""
        now = time.perf_counter()
        compute_s = max((self._barrier_at or now) - self._step_at, 0.0)
        self._barrier_works = self._barrier_at > 0
        self._barrier_at, self._step_at = 0.0, now
        pending, copy = self._pending, self._copy_thread.current
        if copy is not None:
            copy.end_step()
        if pending is None or pending.compute_s is not None:
            self.costs.plain_step(compute_s)
        else:
            pending.compute_s = compute_s
        if copy is not None:
            self._learn(pending, copy)
        self._learn_settled()

    def _learn_settled(self) -> None:
        measured = [(pending, copy) for pending, copy in self._unmeasured if copy.is_measured or copy.error is not None]
        for pending, copy in measured:
            self._learn(pending, copy)
            self._settled_stall_s += copy.waited_s
            self._unmeasured.remove((pending, copy))

    def _learn(self, pending: PendingSnapshot | None, copy: Copy) -> None:
        """Learn what a snapshot costs, as soon as that is known: a GPU may copy for longer than the next step."""
        if pending is None or pending.cost_known or pending.compute_s is None or not copy.is_measured:
            return
        pending.cost_known = True
        if not (pending.was_staged and pending.is_typical) or not pending.compute_s:
            return
        waited_s, begin_s = copy.waited_s, copy.device_waited_s(at_barrier=False)
        cost = self.costs.snapshot(
            blocked_s=waited_s - begin_s,
            compute_s=pending.compute_s,
            begin_s=begin_s,
            copy_s=copy.copied_s,
            overlapped=pending.overlapped,
        )
        if self._ranks.is_first:
            self._client.announce(
                SnapshotCost(
                    step=pending.request.step,
                    blocked_s=round(waited_s, 5),
                    copy_s=round(copy.copied_s, 5),
                    cost_s=round(cost, 5),
                    overlapped=pending.overlapped,
                )
            )

    @property
    def is_preparing(self) -> bool:
        """Whether memory is being reserved or pinned, so that a snapshot would cost more than later ones."""
        copy = self._copy_thread.current
        reserving = copy is not None and self._pending is None and not copy.finished.is_set()
        return reserving or (self._pinning is not None and self._pinning.is_busy)

    @property
    def optimizer_has_stepped(self) -> bool:
        """Whether an optimizer has stepped since the last step ended."""
        return self._barrier_at > 0

    def close(self) -> None:
        """End the threads; the last snapshot must be settled."""
        self._copy_thread.close()
        self._maker.close()
        if self._pinning is not None:
            self._pinning.close()

    def _note_optimizer_step(self) -> None:
        """Note that forward and backward are done: an optimizer is about to step."""
        if not self._barrier_at:
            self._barrier_at = time.perf_counter()
