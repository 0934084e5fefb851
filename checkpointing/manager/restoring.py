"""What a training resumes from, and what is restored of it."""

from __future__ import annotations

import contextlib
from collections.abc import Set
from pathlib import Path

import torch

from checkpointing.commit.export import export_checkpoint
from checkpointing.commit.retention import Retention
from checkpointing.errors import CheckpointError, CommitFailed, InvalidCheckpoint
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.host.environment import initial_weights_folder
from checkpointing.host.heartbeat import Phase
from checkpointing.manager.data_positions import DataPositions
from checkpointing.manager.node_services import NodeServices
from checkpointing.manager.options import Options
from checkpointing.manager.proving import Proving
from checkpointing.manager.script_state import ScriptState
from checkpointing.manager.tracked import Tracked
from checkpointing.process.ranks import Ranks
from checkpointing.resume.initial_weights import load_initial_weights
from checkpointing.resume.restorer import check_nothing_in_the_way, restore_generators


class Restoring:
    """The resuming part of a manager; every rank calls all methods at the same step.

    Args:
        options: The manager's options.
        ranks: This rank.
        node: What is used of the node's agent.
        tracked: What is restored.
        positions: In the loaders that are followed.
        proving: Compares what is recomputed.
        script: What the script keeps besides.
    """

    def __init__(
        self,
        options: Options,
        ranks: Ranks,
        node: NodeServices,
        tracked: Tracked,
        positions: DataPositions,
        proving: Proving,
        script: ScriptState,
    ) -> None:
        self._options, self._ranks, self._node, self._tracked = options, ranks, node, tracked
        self._positions, self._proving, self._script = positions, proving, script
        # The step that was resumed from is in the nodes' memory, and may not be committed.
        self._started_in_shares = False

    def choose(self, *, on_device: bool | None = None) -> LoadedCheckpoint | None:
        """Agree with all ranks on the checkpoint to resume from; None starts from the beginning.

        This changes no training state.

        Args:
            on_device: Whether the model will be on an accelerator, to which its state is copied from memory that all
                ranks share; None goes by where it is now.

        Raises:
            NoValidCheckpoint: There are checkpoints, but none can be loaded.
        """
        self._node.snapshots.settle()
        self._node.heartbeat.write(Phase.RESTORING, 0)
        self._tracked.remember_start()
        if on_device is None:
            on_device = self._tracked.is_on_device
        pinning = self._node.connection.pinning
        if pinning is not None:
            pinning.device_index = torch.accelerator.current_device_index() if on_device else None
        point = self._node.restorer.choose(private=not on_device, before=self._proving.newest_comparable())
        if pinning is not None:
            # What is partly pinned cannot be copied.
            pinning.settle()
        self._proving.restored(point)
        self._started_in_shares = point is not None and point.spread is not None and point.is_snapshot
        return point

    @property
    def stage_name(self) -> str:
        """Name of a supervised run's later trainings; empty for its first one."""
        return self._node.connection.stage.name

    @property
    def starting_folder(self) -> str | None:
        """The checkpoint of another run to start from (`CHECKPOINT_RESUME_FROM`, or `--resume-from`).

        It is for the run's first training: later ones begin with what the script gives them.
        """
        is_first = self._node.connection.stage.number == 1
        return self._options.settings.resume_from or None if is_first else None

    def starting_point(self) -> LoadedCheckpoint | None:
        """Read what `starting_folder` holds; None without one.

        Raises:
            CheckpointError: This library did not write it, or it is damaged.
        """
        folder = self.starting_folder
        if folder is None:
            return None
        return self._node.restorer.starting_point(folder, private=not self._tracked.is_on_device)

    def load_initial_weights(self) -> None:
        """Load the weights that `--init-from` (CHECKPOINT_INIT_FROM) names, where there is nothing to resume from.

        They are for the run's first training.

        Raises:
            CheckpointError: They are damaged, or of another model.
        """
        folder = initial_weights_folder()
        if not folder or self._node.connection.stage.number > 1:
            return
        if self._tracked.state.model is None:
            raise CheckpointError(f"--init-from {folder}: there is no model yet into which its weights could be loaded")
        state = self._tracked.state
        groups = getattr(state.torch_optimizer, "param_groups", ()) if state.optimizer is not None else ()
        trained = (parameter for group in groups for parameter in group["params"])
        self._node.reporter.begun_with_weights(load_initial_weights(state.model, folder, trained))

    def check_way(self, start_step: int) -> None:
        """Check that nothing is where the checkpoints after `start_step` will be written; raises CheckpointError."""
        check_nothing_in_the_way(self._node.connection.tiers, start_step)

    def restore(self, point: LoadedCheckpoint) -> None:
        """Restore everything tracked, the generators and the loaders' positions, and close the checkpoint.

        Raises:
            CheckpointError: The checkpoint is of something else, or of another number of ranks whose `states` differed.
        """
        self._tracked.state.check_number_of_ranks(point, self._ranks.world_size)
        self.restore_model(point)
        self.restore_optimizer(point)
        self.restore_rng(point)
        self._positions.restore(point)
        point.close()

    def restore_model(self, point: LoadedCheckpoint) -> None:
        """Load the weights; raises CheckpointError where the checkpoint is of another model."""
        self._node.snapshots.settle()
        self._tracked.remember_start()
        self._tracked.buckets.restore(point)
        self._node.restorer.load_model(self._tracked.state, point)

    def restore_optimizer(self, point: LoadedCheckpoint) -> None:
        """Load the state of optimizer, scheduler, scaler, and of the further `states`."""
        self._node.snapshots.settle()
        self._tracked.remember_start()
        self._node.restorer.load_optimizer(self._tracked.state, point)

    def restore_states(self, point: LoadedCheckpoint, names: Set[str]) -> None:
        """Load some of the further `states` again, as `restore_optimizer` has done."""
        self._node.restorer.load_states(self._tracked.state, point, names)

    def restore_rng(self, point: LoadedCheckpoint) -> None:
        """Set this rank's generators, and those of the script; call it before the first batch is drawn."""
        self._script.restore(point)
        restore_generators(point, self._ranks.rank, self._ranks.world_size)

    def load_best(self, retention: Retention, last_step: int, *, together: bool, preferred: int | None) -> int | None:
        """Load the model of the best checkpoint; see `CheckpointManager.load_best`."""
        with self._node.heartbeat.during(Phase.IDLE):
            return self._node.restorer.load_best(
                self._tracked.state, retention, last_step, together=together, preferred=preferred
            )

    def folder_of(self, step: int) -> str:
        """Return the path or URL of the durable checkpoint of a step."""
        return f"{self._node.connection.tiers.durable.location}/checkpoint-{step}"

    def export(self, step: int, directory: Path) -> None:
        """Copy the checkpoint of a step into a new directory, from the nearest place that has it; from any thread.

        Args:
            step: The step.
            directory: New directory.

        Raises:
            CheckpointError: No place has it whole, or the directory cannot be written.
        """
        for storage in self._node.connection.tiers.nearest_first:
            with contextlib.suppress(InvalidCheckpoint, OSError):
                export_checkpoint(storage, step, directory)
                return
        raise CheckpointError(f"{self.folder_of(step)} cannot be read: it was removed, or is not whole")

    def is_committed(self, step: int) -> bool:
        """Ask storage whether it has the checkpoint of a step."""
        try:
            return step in self._node.connection.tiers.catalog.committed_steps()
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
        client = self._node.connection.client
        client.offer()
        self._ranks.barrier()
        if not self.is_committed(step):
            reason = f"the nodes could not commit the shares of step {step} that they had in memory"
            client.discard(step, reason, damaged=False)
            raise CommitFailed(reason)
