"""A training whose state can be restored: where its checkpoints are, and what is restored from them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import torch

from checkpointing.errors import CommitFailed
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.host.heartbeat import Phase
from checkpointing.manager.agent_connection import AgentConnection
from checkpointing.manager.data_positions import DataPositions
from checkpointing.manager.heartbeat_writer import HeartbeatWriter
from checkpointing.manager.options import Options
from checkpointing.process.ranks import Ranks
from checkpointing.resume.restorer import Restorer, check_nothing_in_the_way, restore_generators
from checkpointing.snapshot.schedule import SnapshotSchedule
from checkpointing.state.adapter import Adapter
from checkpointing.state.ddp_buckets import DdpBuckets
from checkpointing.state.pipeline import PipelineState
from checkpointing.state.train_state import TrainState, hooks_with_memory
from checkpointing.state.wrappers import is_wrapped, unwrapped
from checkpointing.state.zero import ZeroState, is_engine


class RestorableTraining:
    """The restoring half of the interface for integrations; every rank calls all methods at the same step.

    The agent is reached, or started, when one of the methods first needs it: a script may make several managers before
    the first one trains.

    Args:
        options: The manager's options.
        ranks: This rank, with a group that the training thread uses.
        connect: Reaches, or starts, the node's agent; see `AgentConnection`.

    Attributes:
        rank: Number of this rank among all.
        world_size: Number of all ranks.
        retention: Which checkpoints are kept.
        static_files: Configuration and tokenizer, by file name: part of every checkpoint.
    """

    def __init__(
        self, options: Options, ranks: Ranks, *, connect: Callable[[Options, Ranks], AgentConnection] = AgentConnection
    ) -> None:
        self._options, self._ranks, self._connect = options, ranks, connect
        self._copy_thread_ranks = ranks.with_new_group()
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.retention = options.retention
        self.static_files: dict[str, bytes] = {}
        self._positions = DataPositions(ranks)
        self._buckets = DdpBuckets(is_first=ranks.is_first)
        self._train_state: TrainState
        self._zero: ZeroState | None = None
        # The step that was resumed from is in the nodes' memory, and may not be committed.
        self._started_in_shares = False
        # Classes of what DDP's communication hooks remember, which no checkpoint holds.
        self._hook_states: list[str] = []

    @functools.cached_property
    def _connection(self) -> AgentConnection:
        return self._connect(self._options, self._ranks)

    @property
    def _is_connected(self) -> bool:
        return "_connection" in vars(self)

    @functools.cached_property
    def _snapshotter(self) -> SnapshotSchedule:
        return SnapshotSchedule(
            self._connection.client,
            self._connection.tiers,
            self._copy_thread_ranks,
            overlap=self._options.overlap,
            check_replicas=self._options.check_replicas,
            check_finite=not self._options.allow_non_finite,
            pinning=self._connection.pinning,
            buddy_copies=self._options.buddy_copies,
            waiting=lambda: self._heartbeat.during(Phase.SAVING),
        )

    @functools.cached_property
    def _heartbeat(self) -> HeartbeatWriter:
        return HeartbeatWriter(self._connection.client.control, self._ranks.local_rank)

    @functools.cached_property
    def _restorer(self) -> Restorer:
        connection, options = self._connection, self._options
        supervised = bool(options.settings.agent_socket)
        return Restorer(connection.tiers, connection.client, self._ranks, options.resume, supervised=supervised)

    def pause(self) -> None:
        """Tell the watchdog that no step runs (an evaluation, a change of epoch), and that this rank is alive.

        A hang watchdog then waits longer, until the next step; call this again as a sign of life.
        """
        self._heartbeat.interrupt(Phase.IDLE)

    def outside_steps(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which no step runs; afterwards, one that had begun goes on."""
        return self._heartbeat.during(Phase.IDLE)

    @property
    def scratch(self) -> Path:
        """A folder on this machine for files that this process may not live to remove."""
        return self._connection.client.directory

    @property
    def stage_name(self) -> str:
        """Name of a supervised run's later trainings; empty for its first one."""
        return self._connection.stage.name

    @property
    def starting_folder(self) -> str | None:
        """The checkpoint of another run to start from (`CHECKPOINT_RESUME_FROM`, or `--resume-from`).

        It is for the run's first training: later ones begin with what the script gives them.
        """
        return self._options.settings.resume_from or None if self._connection.stage.number == 1 else None

    def track(
        self,
        *,
        model: Any,
        optimizer: Any,
        scheduler: Any = None,
        scaler: Any = None,
        states: Mapping[str, Any] | None = None,
        adapter: Adapter | None = None,
        pipeline: bool = False,
    ) -> None:
        """Set what is saved and restored.

        Sharded state (FSDP2, tensor parallelism) can be restored on any mesh. Where the ranks of each machine hold all
        of it, it is saved whole; otherwise each machine writes its share.

        Args:
            model: The model, or a DeepSpeed engine; the wrappers of DDP and torch.compile are looked through.
            optimizer: The optimizer; that of a DeepSpeed engine is known.
            scheduler: The learning rate scheduler.
            scaler: The gradient scaler.
            states: Further objects with `state_dict` and `load_state_dict`, by name.
            adapter: The part of the model that is trained, where the rest is not to be saved.
            pipeline: The model is this rank's stage of a pipeline; all ranks call this together.

        Raises:
            ValueError: A name in `states` is taken.
            CheckpointError: The model or the optimizer is of a kind that cannot be saved.
        """
        while is_wrapped(model):
            if isinstance(model, torch.nn.parallel.DistributedDataParallel):
                self._hook_states = hooks_with_memory(model)
            model = unwrapped(model)
        if is_engine(model):
            if self._zero is None or self._zero.engine is not model:
                self._zero = ZeroState(model)
            model, optimizer = self._zero.module, self._zero
        zero = self._zero if optimizer is self._zero else None
        stages = PipelineState(model, getattr(optimizer, "optimizer", optimizer), self._ranks) if pipeline else None
        self._train_state = TrainState(model, optimizer, scheduler, scaler, dict(states or {}), adapter, zero, stages)
        self._buckets.track([model, optimizer, *self._train_state.states.values()])

    def choose(self, *, on_device: bool | None = None) -> LoadedCheckpoint | None:
        """Agree with all ranks on the checkpoint to resume from; None starts from the beginning.

        This changes no training state.

        Args:
            on_device: Whether the model will be on an accelerator, to which its state is copied from memory that all
                ranks share; None goes by where it is now.

        Raises:
            NoValidCheckpoint: There are checkpoints, but none can be loaded.
        """
        self._snapshotter.settle()
        self._heartbeat.write(Phase.RESTORING, 0)
        if on_device is None:
            on_device = self._is_on_device
        pinning = self._connection.pinning
        if pinning is not None:
            pinning.device_index = torch.accelerator.current_device_index() if on_device else None
        point = self._restorer.choose(private=not on_device)
        if pinning is not None:
            # What is partly pinned cannot be copied.
            pinning.settle()
        self._started_in_shares = point is not None and point.spread is not None and point.is_snapshot
        return point

    @property
    def _is_on_device(self) -> bool:
        return self._train_state.model is not None and self._train_state.on_gpu

    def starting_point(self) -> LoadedCheckpoint | None:
        """Read what `starting_folder` holds; None without one.

        Raises:
            CheckpointError: This library did not write it, or it is damaged.
        """
        folder = self.starting_folder
        if folder is None:
            return None
        return self._restorer.starting_point(folder, private=not self._is_on_device)

    def restore_model(self, point: LoadedCheckpoint) -> None:
        """Load the weights; raises CheckpointError where the checkpoint is of another model."""
        self._snapshotter.settle()
        self._buckets.restore(point)
        self._restorer.load_model(self._train_state, point)

    def restore_optimizer(self, point: LoadedCheckpoint) -> None:
        """Load the state of optimizer, scheduler, scaler, and of the further `states`."""
        self._snapshotter.settle()
        self._restorer.load_optimizer(self._train_state, point)

    def restore_states(self, point: LoadedCheckpoint, names: Set[str]) -> None:
        """Load some of the further `states` again, as `restore_optimizer` has done."""
        self._restorer.load_states(self._train_state, point, names)

    def restore_rng(self, point: LoadedCheckpoint) -> None:
        """Set this rank's generators; call it before the first batch is drawn."""
        restore_generators(point, self.rank, self.world_size)

    def positions_in(self, point: LoadedCheckpoint) -> list[Any]:
        """Return the loaders' positions that a checkpoint holds; raises InvalidCheckpoint where it is damaged."""
        return self._positions.read(point)

    def load_best(self, last_step: int, *, together: bool = False, preferred: int | None = None) -> int | None:
        """Load the model of the best checkpoint by `best_metric`, and nothing else of it.

        A damaged checkpoint is skipped with a warning.

        Args:
            last_step: Step of the weights that the model has now; they need not be read.
            together: All ranks call this and load the same; otherwise this rank alone does.
            preferred: The best step, where the caller knows it; others are used where it cannot be read.

        Returns:
            The step; None where no checkpoint carries the metric and can be read, and the model is unchanged.

        Raises:
            CheckpointError: The checkpoint is of another model; or its shards cannot be read any more, and a part of
                the model has been loaded.
        """
        with self._heartbeat.during(Phase.IDLE):
            return self._restorer.load_best(
                self._train_state, self.retention, last_step, together=together, preferred=preferred
            )

    def folder_of(self, step: int) -> str:
        """Return the path or URL of the durable checkpoint of a step."""
        return f"{self._connection.tiers.durable.location}/checkpoint-{step}"

    def is_committed(self, step: int) -> bool:
        """Ask storage whether it has the checkpoint of a step."""
        try:
            return step in self._connection.tiers.catalog.committed_steps()
        except OSError:
            return False

    def await_commit_of_start(self, step: int) -> None:
        """Wait until the step that was resumed from is committed, if it was in shares in the nodes' memory.

        Raises:
            CommitFailed: It is not: a node was lost, say. The next attempt does not find the shares, and computes the
                steps before again.
        """
        if not self._started_in_shares:
            return
        self._connection.client.offer()
        self._ranks.barrier()
        if not self.is_committed(step):
            reason = f"the nodes could not commit the shares of step {step} that they had in memory"
            self._connection.client.discard(step, reason, damaged=False)
            raise CommitFailed(reason)

    def check_way(self, start_step: int) -> None:
        """Check that nothing is where the checkpoints after `start_step` will be written; raises CheckpointError."""
        check_nothing_in_the_way(self._connection.tiers, start_step)
