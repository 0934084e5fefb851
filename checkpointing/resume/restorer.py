"""Restores a training's state: chooses the checkpoint together with all ranks, and loads it."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

import torch

from checkpointing.agent.client import AgentClient
from checkpointing.commit.retention import Retention, best_first
from checkpointing.commit.tiers import Tiers
from checkpointing.errors import CheckpointError, InvalidCheckpoint, StorageUnreachable
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.format.layout import OPTIMIZER_NAME
from checkpointing.host.environment import rank_settings
from checkpointing.process import rng
from checkpointing.process.ranks import Ranks
from checkpointing.resume.agreement import choose, own_checkpoint
from checkpointing.resume.verified_read import read_checkpoint
from checkpointing.state.train_state import TrainState

logger = logging.getLogger("checkpointing")


class Restorer:
    """Reads the checkpoints of one training.

    Args:
        tiers: Where checkpoints are kept.
        client: The connection to the agent, which may hold snapshots in memory.
        ranks: This rank, with a group that the training thread uses.
        resume: `auto`, `never`, or a step.
        supervised: Whether a supervisor tells the user where training resumes.

    Attributes:
        seconds: Time spent on choosing, reading and loading since this was last set to 0.
    """

    def __init__(self, tiers: Tiers, client: AgentClient, ranks: Ranks, resume: str | int, *, supervised: bool) -> None:
        self._tiers, self._client, self._ranks = tiers, client, ranks
        self._resume, self._supervised = resume, supervised
        self.seconds = 0.0

    def choose(self, *, private: bool, before: int | None = None) -> LoadedCheckpoint | None:
        """Agree with all ranks on the state to resume from; None starts from the beginning.

        Args:
            private: Whether tensors must be the reader's own; see `LoadedCheckpoint`.
            before: Resume from before this step, if anything is.

        Raises:
            NoValidCheckpoint: There are checkpoints, but none can be loaded.
            StorageUnreachable: Storage does not answer.
        """
        with self._timed():
            point = choose(self._tiers, self._resume, self._ranks, self._client, private=private, before=before)
        if point is not None and self._ranks.is_first and not self._supervised:
            print(f"checkpointing: resumed from step {point.step} ({point.label})", file=sys.stderr, flush=True)
        return point

    def starting_point(self, folder: str, *, private: bool) -> LoadedCheckpoint:
        """Read a checkpoint of another run.

        Args:
            folder: Its folder.
            private: Whether tensors must be the reader's own; see `LoadedCheckpoint`.

        Raises:
            CheckpointError: This library did not write it, or it is damaged.
        """
        found = own_checkpoint(Path(folder))
        if found is None:
            raise CheckpointError(
                f"--resume-from {folder}: no checkpoint of this library, which is all that a CheckpointManager reads; "
                "for one of a stock Trainer use checkpointing.transformers.resilient"
            )
        storage, step = found
        return read_checkpoint(storage, step, self._ranks.rank, self._ranks.world_size, private=private)

    def load_model(self, train_state: TrainState, point: LoadedCheckpoint) -> None:
        """Load the weights.

        Raises:
            CheckpointError: The checkpoint is of another model.
        """
        with self._timed():
            train_state.restore_model(point, placer(train_state, self._ranks))

    def load_optimizer(self, train_state: TrainState, point: LoadedCheckpoint) -> None:
        """Load the state of optimizer, scheduler, scaler, and of the further states, after that of the model.

        Raises:
            CheckpointError: A file cannot be parsed, or is of another optimizer.
        """
        with self._timed():
            place = placer(train_state, self._ranks)
            train_state.restore_optimizer(point, self._ranks.rank, place, self._ranks.world_size)
            point.end_reading()

    def load_states(self, train_state: TrainState, point: LoadedCheckpoint, names: Set[str]) -> None:
        """Load some of the further states again.

        Raises:
            CheckpointError: A file cannot be parsed, or does not fit.
        """
        with self._timed():
            train_state.restore_states(point, self._ranks.rank, names, self._ranks.world_size)

    def load_best(
        self, train_state: TrainState, retention: Retention, last_step: int, *, together: bool, preferred: int | None
    ) -> int | None:
        """Load the model of the best checkpoint; see `CheckpointManager.load_best`."""
        ranks = self._ranks if together else Ranks(self._ranks.rank, self._ranks.world_size)
        order: list[int] | str = []
        if ranks.group is None or ranks.is_first:
            try:
                manifests = [entry.manifest for entry in self._tiers.catalog.entries() if entry.manifest is not None]
                best = best_first(manifests, retention)
                order = [preferred, *(step for step in best if step != preferred)] if preferred is not None else best
            except OSError as error:
                # All ranks end, and none waits for this one.
                order = error.strerror or str(error)
        order = ranks.broadcast(order)
        if isinstance(order, str):
            raise StorageUnreachable(f"the best checkpoint cannot be looked up: {order}")
        for step in order:
            if step == last_step:
                return step
            point = self._read_valid(step, alone=ranks.group is None)
            readable = all(ranks.gather(point is not None))
            if point is not None:
                if readable:
                    train_state.restore_model(point)
                point.close()
            if readable:
                return step
        return None

    def _read_valid(self, step: int, *, alone: bool) -> LoadedCheckpoint | None:
        """Read a checkpoint's model from the nearest tier that has it whole; all ranks together unless `alone`."""
        try:
            entries = [entry for entry in self._tiers.catalog.entries() if entry.step == step and entry.manifest]
        except (CheckpointError, OSError) as error:
            logger.warning("the checkpoint of step %d is skipped: %s", step, error)
            return None
        for entry in entries:
            try:
                return read_checkpoint(
                    entry.storage,
                    step,
                    self._ranks.rank,
                    self._ranks.world_size,
                    # It is copied into the model.
                    private=False,
                    alone=alone,
                    without=(OPTIMIZER_NAME,),
                )
            except (InvalidCheckpoint, StorageUnreachable) as error:
                logger.warning("the checkpoint of step %d is skipped: %s", step, error)
        return None

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began


def restore_generators(point: LoadedCheckpoint, rank: int, world_size: int) -> None:
    """Set this rank's random number generators; to the first rank's state where the checkpoint has none for this one.

    Scripts seed all ranks alike, and those that share layers (tensor parallelism) must draw the same: what is left of
    their seed in a new rank would not be what the others have.

    Raises:
        InvalidCheckpoint: The file cannot be parsed.
    """
    own = rng.file_name(rank, world_size)
    for name in (own, *rng.FIRST_RANKS_FILES):
        if point.has(name):
            with point.reading(name):
                rng.set_state(point.torch_object(name))
            break
    # Rank 0's has another name for a single rank. With virtual ranks, nothing depends on the ranks' own generators.
    if not point.has(own) and rank > 0 and not rank_settings().is_exact:
        logger.warning(
            "%s holds no generator state of rank %d (it has that of %d): it continues with that of rank 0",
            point.label,
            rank,
            point.world_size,
        )


def placer(train_state: TrainState, ranks: Ranks) -> Callable[[Any], Any]:
    """Return what moves a state that all ranks have to the model's device, where each would have to copy all of it."""
    model, optimizer = train_state.model, train_state.optimizer
    # A stage's tensors are its own, although they are not sharded.
    if model is None or train_state.kind.is_cut or not isinstance(optimizer, torch.optim.Optimizer):
        return lambda state: state
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if not ranks.can_share_copies(device):
        return lambda state: state
    return lambda state: ranks.to_device(state, device)


def check_nothing_in_the_way(tiers: Tiers, start_step: int) -> None:
    """Check that no other writer's checkpoint is where one after `start_step` will be written.

    Raises:
        CheckpointError: One is; it is neither read nor touched.
    """
    foreign = [step for storage in tiers.nearest_first for step in storage.foreign_steps()]
    in_the_way = sorted({step for step in foreign if step > start_step})
    if in_the_way:
        names = ", ".join(f"checkpoint-{step}" for step in in_the_way[:3]) + (", …" if in_the_way[3:] else "")
        place = tiers.durable.location
        raise CheckpointError(
            f"{place} holds checkpoints that this library has not written ({names}): they are left as they are. "
            f"Start from one (train({place + '/checkpoint-' + str(in_the_way[-1])!r}), or --resume-from), or train "
            "in another output_dir"
        )
