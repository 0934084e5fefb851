"""A training that is saved at step boundaries, resumed, and stopped together with the other ranks."""

from __future__ import annotations

import functools
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from checkpointing.agent.events import BatchShape
from checkpointing.data.cursor import LoaderCursor
from checkpointing.errors import CommitFailed, Preempted
from checkpointing.files.torch_files import torch_bytes
from checkpointing.host.failpoints import failpoint
from checkpointing.host.heartbeat import Phase
from checkpointing.manager import stop_signal
from checkpointing.manager.agent_connection import AgentConnection
from checkpointing.manager.last_step import LastStep
from checkpointing.manager.options import Options
from checkpointing.manager.reporter import Reporter
from checkpointing.manager.restorable import RestorableTraining
from checkpointing.manager.slow_ranks import SpeedComparison, compare_speeds
from checkpointing.manager.step_protocol import Due, Measured, StepProtocol
from checkpointing.process import rng
from checkpointing.process.flag_sync import FlagSync
from checkpointing.process.ranks import Ranks
from checkpointing.snapshot.cadence import CadenceClock
from checkpointing.snapshot.request import SmallFile, SnapshotRequest

logger = logging.getLogger("checkpointing")


def _may_hold_parameters(state: Any) -> bool:
    """Return whether an object in `states` may be what holds parameters, without being a module or an optimizer."""
    return not isinstance(state, torch.nn.Module) and not hasattr(state, "param_groups")


class CheckpointedTraining(RestorableTraining):
    """The interface for integrations; every rank calls all methods at the same step, from the training thread.

    Args:
        options: The manager's options.
        ranks: This rank, with a group that the training thread uses.
        connect: Reaches, or starts, the node's agent; see `AgentConnection`.

    Attributes:
        finished: Set by the integration: training has reached its end.
    """

    def __init__(
        self, options: Options, ranks: Ranks, *, connect: Callable[[Options, Ranks], AgentConnection] = AgentConnection
    ) -> None:
        super().__init__(options, ranks, connect=connect)
        settings = options.settings
        self._protocol = StepProtocol(
            FlagSync(ranks.with_new_group().group),
            CadenceClock(options.cadence, time.monotonic(), settings.num_failures, settings.observed_s),
            is_first=ranks.is_first,
            stop_wanted=lambda: self.stop_wanted,
            measure=self._measure,
            is_committed=self.is_committed,
        )
        self._last_step = LastStep()
        self._total_steps: int | None = None
        self._speeds: SpeedComparison | None = None
        self._closed = self._stopped = False
        self.finished = False

    @functools.cached_property
    def _reporter(self) -> Reporter:
        return Reporter(self._connection.client, is_first=self._ranks.is_first)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def stop_wanted(self) -> bool:
        """Whether this rank has been asked to stop; `end_of_step`, or `agree_to_stop`, agrees on it with all ranks."""
        return stop_signal.requested() or self._connection.client.control.stop_requested

    @property
    def stall_s(self) -> float:
        """Seconds that this rank's training has waited for snapshots so far."""
        return self._snapshotter.stall_s

    @property
    def awaited(self) -> int | None:
        """A step whose commit the caller waits for `Due` to report."""
        return self._protocol.awaited

    @awaited.setter
    def awaited(self, step: int | None) -> None:
        self._protocol.awaited = step

    def begin(self, start_step: int, total_steps: int | None = None) -> None:
        """Start the training loop at this step.

        Args:
            start_step: The step that was restored; 0 for none.
            total_steps: Steps that training is to have at its end, for progress displays; None if not known.

        Raises:
            CheckpointError: Something in `states` is sharded.
        """
        self._total_steps = total_steps
        self._heartbeat.set_start(start_step)
        self._reporter.training_started(start_step, total_steps, self._restorer.seconds)
        self._restorer.seconds = 0.0
        self._heartbeat.write(Phase.TRAINING, start_step)
        if self._hook_states and not self._train_state.states and self._ranks.is_first:
            logger.warning(
                "the state of DDP's communication hook (%s) is in no checkpoint: a resumed run begins with an empty "
                "one. Give it in `states` as an object with state_dict and load_state_dict",
                ", ".join(self._hook_states),
            )
        self._heartbeat.watch_compiler()
        node_rank, report = self._options.settings.node_rank, self._reporter.slow_ranks
        self._speeds = compare_speeds(self._train_state.model, self._ranks, node_rank=node_rank, report=report)
        if self._train_state.model is not None and self._train_state.optimizer is not None:
            self._train_state.check()
            self._warn_of_unsaved()
            self._snapshotter.prepare(self._train_state, self._ranks)
        # What was just restored need not be saved again.
        self._snapshotter.last_step, self._snapshotter.last_is_committed = start_step if start_step else -1, True

    def _warn_of_unsaved(self) -> None:
        unsaved = self._train_state.num_unsaved
        if unsaved and self._ranks.is_first and not any(map(_may_hold_parameters, self._train_state.states.values())):
            logger.warning(
                "the optimizer trains %d parameters that are not in `model`: no checkpoint holds them, and a resumed "
                "run begins with what the script makes. Give their module in `states`, or one model that has them all",
                unsaved,
            )

    def end_of_step(self, step: int) -> Due:
        """Write a heartbeat, and agree with all ranks on what is due now."""
        failpoint("training.step")
        self._heartbeat.end_step(step)
        if step == self._total_steps:
            # Whatever a script does before it closes.
            self.pause()
        self._snapshotter.end_of_step()
        self._buckets.end_of_step()
        if self._speeds is not None:
            self._speeds.end_of_step()
        return self._protocol.end_of_step(step)

    def _measure(self) -> Measured:
        snapshotter = self._snapshotter
        last_commit = self._connection.client.control.last_commit
        return Measured(snapshotter.costs.snapshot_s, snapshotter.is_preparing, last_commit)

    def agree_to_stop(self) -> bool:
        """Return, outside steps, whether any rank had been asked to stop at the previous call.

        Every rank must call this equally often. The next `end_of_step` does not repeat what is agreed here.
        """
        return self._protocol.agree_to_stop()

    def begin_step(self) -> None:
        """Tell the watchdog that a step begins. Only needed after `pause`; the end of the next step implies it."""
        if self._heartbeat.phase is Phase.IDLE:
            self._heartbeat.write(Phase.TRAINING, self._heartbeat.step)

    def follow(self, cursor: LoaderCursor, group_size: int = 1) -> None:
        """Have the position of a loader saved that the caller drives; see `DataPositions.follow`."""
        self._positions.follow(cursor, group_size)

    def forget_positions(self) -> None:
        """Stop following all loaders."""
        self._positions.forget()

    def announce_batch(self, shape: BatchShape) -> None:
        """Report how a step is cut, so that a supervisor can cut finer where memory runs out."""
        self._reporter.batch_shape(shape)

    def wants(self, step: int, *, commit: bool = True) -> bool:
        """Return whether `save` would do anything: there is no snapshot of this step, or none that is committed."""
        snapshotter = self._snapshotter
        return step != snapshotter.last_step or (commit and not snapshotter.last_is_committed)

    def save(
        self,
        step: int,
        samples_consumed: int,
        files: Mapping[str, SmallFile] | None = None,
        shared_files: Mapping[str, SmallFile] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        wait: bool = False,
        commit: bool = True,
        generators: Mapping[str, Any] | None = None,
    ) -> None:
        """Snapshot the state of a step; the copy runs in the background, up to the next optimizer step.

        Until then, nothing but an optimizer may change the tracked state.

        Args:
            step: The step that has just ended.
            samples_consumed: The data cursor, in samples drawn by all ranks.
            files: This rank's own small files, by name; functions are called during training, in the copy thread.
            shared_files: Small files that are equal on all ranks; only each node's local rank 0 needs to give them.
            metrics: What was measured at this step, by name; decides which checkpoint is best. Only rank 0's count.
            wait: Take the snapshot even if that means waiting for memory; otherwise it is skipped when all is in use.
            commit: Commit it to storage, too; otherwise it stays in memory until there is a newer one.
            generators: An earlier `rng.state` to be saved instead of the present one.
        """
        if not self.wants(step, commit=commit):
            return
        self._protocol.saved(commit=commit)
        generators_file = functools.partial(torch_bytes, dict(generators or rng.state(self.world_size)))
        own = {**(files or {}), rng.file_name(self.rank, self.world_size): generators_file, **self._positions.files()}
        finite = {name: value for name, value in (metrics or {}).items() if math.isfinite(value)}
        shared = {**(shared_files or {}), **self._buckets.files()}
        request = SnapshotRequest(step, samples_consumed, own, shared, self.retention, finite, wait=wait, commit=commit)
        with self._heartbeat.during(Phase.SAVING, step):
            self._snapshotter.take(self._train_state, request, self.static_files)

    def wait_for_commit(self) -> None:
        """Block until the last snapshot that is to be committed is.

        Raises:
            CommitFailed: Storage refused it.
        """
        snapshotter, error = self._snapshotter, None
        with self._heartbeat.during(Phase.SAVING):
            snapshotter.settle()
            if snapshotter.direct_error is not None:
                error = snapshotter.direct_error
            elif snapshotter.committing_step is not None:
                error = self._connection.client.wait(snapshotter.committing_step)
        if error is not None:
            raise CommitFailed(error)

    def stop(self, step: int) -> None:
        """End this rank together with all others, once the snapshot of `step` is committed.

        Raises:
            Preempted: Always, after success.
            CommitFailed: Storage refused the snapshot.
        """
        self._stopped = True
        self.close()
        raise Preempted(step)

    def close(self) -> None:
        """End training: wait for the last commit, and leave nothing in flight."""
        if self._closed:
            return
        self._closed = True
        self._buckets.close()
        if not self._is_connected:
            stop_signal.end_reading(stopped=False)
            return
        step = self._heartbeat.step
        try:
            self._finish(step)
        finally:
            self._connection.close_own_agent()

    def _finish(self, step: int) -> None:
        self._heartbeat.write(Phase.SAVING, step)
        self._protocol.drain()
        if self._speeds is not None:
            self._speeds.close()
        self._commit_last_step()
        self.wait_for_commit()
        if step == self._heartbeat.start_step:
            self.await_commit_of_start(step)
        # No rank leaves before every rank's commit is known: the launcher would take an early exit for a failure.
        self._ranks.barrier()
        self._snapshotter.close()
        self._heartbeat.write(Phase.DONE, step)
        stop_signal.end_reading(stopped=self._stopped)
        # Under a supervisor, the end of a loop is the end of its stage: another manager begins another one.
        loop_ended = self._last_step.step > 0 and self._options.has_chosen_location
        self._connection.leave(step, finished=not self._stopped and (self.finished or loop_ended))

    def _commit_last_step(self) -> None:
        """Commit the last step of a loop, where it was not due, or was skipped because all memory was in use."""
        last = self._last_step
        if not last.step or self._stopped:
            return
        self._snapshotter.settle()
        missing = self._snapshotter.committing_step != last.step and self._heartbeat.start_step != last.step
        unfit = sys.exc_info()[0] is not None or self._snapshotter.optimizer_has_stepped
        written = self._snapshotter.direct_step == last.step
        if last.is_to_be_committed(self._ranks, missing=missing, unfit=unfit, written=written):
            self._snapshotter.last_step = -1
            self.save(last.step, last.samples_consumed, metrics=last.metrics, wait=True)
