"""What a training saves: snapshots of its steps, and their commits."""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch

from checkpointing.commit.retention import Retention
from checkpointing.errors import CommitFailed
from checkpointing.files.torch_files import torch_bytes
from checkpointing.host.heartbeat import Phase
from checkpointing.manager.data_positions import DataPositions
from checkpointing.manager.node_services import NodeServices
from checkpointing.manager.proving import Proving
from checkpointing.manager.script_state import ScriptState
from checkpointing.manager.tracked import Tracked
from checkpointing.process import rng
from checkpointing.process.ranks import Ranks
from checkpointing.snapshot.request import SmallFile, SnapshotRequest


class StepSaves:
    """The saving part of a manager; every rank calls all methods at the same step.

    Args:
        ranks: This rank.
        node: What is used of the node's agent.
        tracked: What is saved.
        positions: In the loaders that are followed.
        proving: Has the record of the last steps.
        script: What the script keeps besides.

    Attributes:
        last: The last step of a loop that ended.
    """

    def __init__(
        self,
        ranks: Ranks,
        node: NodeServices,
        tracked: Tracked,
        positions: DataPositions,
        proving: Proving,
        script: ScriptState,
    ) -> None:
        self._ranks, self._node, self._tracked, self._positions = ranks, node, tracked, positions
        self._proving, self._script = proving, script
        self.last = LastStep()

    def begin(self, start_step: int) -> None:
        """Prepare the first snapshot; what was just restored need not be saved again."""
        snapshots = self._node.snapshots
        if self._tracked.has_training:
            snapshots.prepare(self._tracked.state, self._ranks)
        snapshots.last_step, snapshots.last_is_committed = start_step if start_step else -1, True

    def wants(self, step: int, *, commit: bool = True) -> bool:
        """Return whether `save` would do anything: there is no snapshot of this step, or none that is committed."""
        snapshots = self._node.snapshots
        return step != snapshots.last_step or (commit and not snapshots.last_is_committed)

    def save(
        self,
        step: int,
        samples_consumed: int,
        retention: Retention,
        files: Mapping[str, SmallFile],
        shared_files: Mapping[str, SmallFile],
        *,
        metrics: Mapping[str, float],
        wait: bool,
        commit: bool,
        generators: Mapping[str, Any] | None,
    ) -> None:
        """Snapshot the state of a step; see `CheckpointManager.save`."""
        self._tracked.check_registered()
        rank, world_size = self._ranks.rank, self._ranks.world_size
        generators_file = functools.partial(torch_bytes, dict(generators or rng.state(world_size)))
        own = {**files, rng.file_name(rank, world_size): generators_file, **self._positions.files(step)}
        own |= self._proving.files(step) | self._script.files()
        if commit:
            self._script.look(step)
        # A loop may give tensors of one number.
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        shared = {**shared_files, **self._tracked.buckets.files()}
        request = SnapshotRequest(step, samples_consumed, own, shared, retention, finite, wait=wait, commit=commit)
        with self._node.heartbeat.during(Phase.SAVING, step):
            self._node.snapshots.take(self._tracked.state, request, self._tracked.static_files)

    def wait_for_commit(self) -> None:
        """Block until the last snapshot that is to be committed is; raises CommitFailed if storage refused it."""
        snapshots, error = self._node.snapshots, None
        with self._node.heartbeat.during(Phase.SAVING):
            snapshots.settle()
            if snapshots.direct_error is not None:
                error = snapshots.direct_error
            elif snapshots.committing_step is not None:
                error = self._node.connection.client.wait(snapshots.committing_step)
        if error is not None:
            raise CommitFailed(error)

    def is_last_missing(self) -> bool:
        """Agree with all ranks whether the last step of a loop is yet to be committed, and can be.

        It was not due, or was skipped because all memory was in use.
        """
        last, snapshots = self.last, self._node.snapshots
        if not last.step:
            return False
        snapshots.settle()
        missing = snapshots.committing_step != last.step and self._node.heartbeat.start_step != last.step
        unfit = sys.exc_info()[0] is not None or snapshots.optimizer_has_stepped
        written = snapshots.direct_step == last.step
        if not last.is_to_be_committed(self._ranks, missing=missing, unfit=unfit, written=written):
            return False
        snapshots.last_step = -1
        return True


logger = logging.getLogger("checkpointing")


class LastStep:
    """What `CheckpointManager.step` was last called with.

    Attributes:
        step: Number of the step; 0 before the first.
        samples_consumed: Samples drawn by all ranks.
        metrics: Metrics of the step, by name.
    """

    def __init__(self) -> None:
        self.step = self.samples_consumed = 0
        self.metrics: Mapping[str, float] | None = None

    def ended(self, step: int, samples_consumed: int, metrics: Mapping[str, float] | None) -> None:
        """Note that a step has ended."""
        self.step, self.samples_consumed, self.metrics = step, samples_consumed, metrics

    def is_to_be_committed(self, ranks: Ranks, *, missing: bool, unfit: bool, written: bool) -> bool:
        """Decide, together with all ranks, whether the step is committed now.

        Args:
            ranks: This rank among all.
            missing: This rank's step is in no snapshot that is committed. Other machines may have had memory for it.
            unfit: This rank's state belongs to no step: a further one has begun, or an exception is being raised.
            written: This rank has committed the step itself, without a snapshot.
        """
        found = ranks.maximum(torch.tensor([int(missing), int(unfit), int(written)]))
        missing, unfit, written = map(bool, found.tolist())
        missing = missing and not written
        if missing and unfit:
            logger.warning("step %d is not committed: close() was called in the middle of a later step", self.step)
        return missing and not unfit
