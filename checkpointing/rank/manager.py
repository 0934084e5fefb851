"""`CheckpointManager`: what a rank uses to save, to resume, and to stop together with the other ranks.

manager = CheckpointManager("checkpoints", model=model, optimizer=optimizer, save_steps=100)
steps = range(manager.resume(), total_steps)
for step, batch in zip(steps, manager.batches(loader)):
    ...                                   # forward, backward, optimizer.step()
    manager.step(step + 1)
manager.close()
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.agent.client import AgentClient, AgentProcess
from checkpointing.catalog import Catalog
from checkpointing.clock import machine_clock
from checkpointing.data.cursor import LoaderCursor, state_name
from checkpointing.environment import LOCATION_ENV, rank_settings
from checkpointing.errors import CheckpointError, CommitFailed, InvalidCheckpoint, Preempted, StorageUnreachable
from checkpointing.failpoints import failpoint
from checkpointing.heartbeat import Heartbeat, Phase
from checkpointing.memory import parse_bytes
from checkpointing.rank import broadcast, device, rng, stop_signal
from checkpointing.rank.adapter import Adapter
from checkpointing.rank.cadence import DEFAULT_OVERHEAD_CAP, Auto, Cadence, CadenceClock
from checkpointing.rank.flag_sync import Flag, FlagSync
from checkpointing.rank.pinning import Pinning
from checkpointing.rank.ranks import Ranks
from checkpointing.rank.restore import choose, own_checkpoint, read_checkpoint
from checkpointing.rank.restore_point import RestorePoint
from checkpointing.rank.sharding import has_sharded
from checkpointing.rank.snapshot import Request, SmallFile
from checkpointing.rank.snapshotter import Snapshotter
from checkpointing.rank.spikes import SkippedSteps
from checkpointing.rank.torch_files import torch_bytes
from checkpointing.rank.train_state import TrainState, hook_states
from checkpointing.retention import Retention, best_first
from checkpointing.shared_memory import SharedMemory
from checkpointing.stages import STAGES, Stage
from checkpointing.storage import LocalStorage
from checkpointing.tiers import DEFAULT_LOCAL_KEEP_LAST, Tiers, open_tiers

logger = logging.getLogger("checkpointing")
# All ranks agree on what to do about so often, and where steps are longer, at each.
_AGREE_EVERY_S = 1.0
_MAX_INTERVAL = 100
# Of what a loop measures at every step, so often a supervisor is told.
_REPORT_EVERY_S = 1.0
_END = object()


def resume_policy(text: str) -> str | int:
    """`auto`, `never`, or a step.

    Raises:
        ValueError: it is none of them.
    """
    if text in ("auto", "never"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    raise ValueError(f"resume {text!r} is not allowed; use auto, never, or the number of a committed step")


def micro_batch_divisor() -> int:
    """Into how many parts a micro-batch is to be cut, and how many times more of them a step is to accumulate.

    1 until an attempt has run out of memory; a supervisor then doubles it. For bare loops: `resilient` does it itself.
    """
    return rank_settings().micro_batch_divisor


def skipped_steps() -> SkippedSteps:
    """Steps that training is to pass over without computing anything, since what they see has done harm twice.

    None until a supervisor says so. For bare loops: `resilient` does it itself.
    """
    return SkippedSteps(rank_settings().skipped_steps)


@dataclass(frozen=True)
class Due:
    """What all ranks are to do at this step boundary: commit a snapshot, make one in memory, end after committing.

    Attributes:
        committed, not_committed: what has become of the save that `CheckpointManager.awaited` names.
    """

    stop: bool = False
    save: bool = False
    snapshot: bool = False
    committed: bool = False
    not_committed: bool = False


class CheckpointManager:
    """One per rank. All methods are called by every rank, at the same step, from the thread that trains."""

    def __init__(
        self,
        location: str | os.PathLike[str] | None = None,
        *,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        states: Mapping[str, Any] | None = None,
        save_steps: int | Auto | None = None,
        save_minutes: float | None = None,
        snapshot_steps: int | Auto | None = "auto",
        overhead_cap: float = DEFAULT_OVERHEAD_CAP,
        keep_last: int | None = None,
        keep_every: int | None = None,
        best_metric: str | None = None,
        greater_is_better: bool = False,
        local_tier: str | os.PathLike[str] | None = None,
        local_keep_last: int = DEFAULT_LOCAL_KEEP_LAST,
        resume: str | int | None = None,
        memory_limit: int | str | None = None,
        overlap: bool | None = None,
        check_replicas: bool = True,
    ) -> None:
        """Connect to the node's checkpoint agent, or start one where there is no supervisor.

        Args:
            location: a directory, or a URL: `file://`, `s3://bucket/prefix`, or another that fsspec knows. A
                supervisor's choice (`CHECKPOINT_LOCATION`) goes first.
            model, optimizer, scheduler, scaler: what is saved and restored; may be given later by `track`.
            states: further objects with `state_dict` and `load_state_dict` (a moving average of the weights, say), by
                name; each is kept in `<name>.pt`. They may change at any moment: training waits while they are copied.
            save_steps: a checkpoint is committed at every multiple of it; "auto" chooses by measured cost.
            save_minutes: and at least so often.
            snapshot_steps: a snapshot is held in memory at every multiple of it, from which a new attempt goes on;
                "auto" (default) chooses by measured cost, None makes none but for commits.
            overhead_cap: share of the run's time that "auto" may spend.
            keep_last: newest checkpoints to keep; None keeps all.
            keep_every: checkpoints to keep besides: every one whose step is a multiple of this,
            best_metric: and the best by this metric of those that are given to `save`;
            greater_is_better: how that one compares.
            local_tier: a fast directory of this machine: checkpoints are committed there first, and copied to
                `location` in the background. A supervisor's choice goes first.
            local_keep_last: newest checkpoints to keep there.
            resume: "auto" (default), "never", or a step. A supervisor's choice (`CHECKPOINT_RESUME`) goes first.
            memory_limit: memory that snapshots may take on this node, in bytes or as text ("8GiB"); default: half of
                what is free. A supervisor's choice goes first.
            overlap: copy beside training (True), or while it waits (False); None chooses by measured cost.
            check_replicas: compare the ranks' parameters and optimizer state before each snapshot.

        The agent is reached, or started, when the manager is first used: several may be made before the first one
        trains. One of this process trains at a time. Under a supervisor each further location is a stage of the run,
        kept in a folder of its own inside the supervisor's location, in the order in which they are first used.

        Raises:
            ValueError: location, local_tier, resume, a cadence or the memory limit is not usable.
            CheckpointError: the model or the optimizer is of a kind that cannot be saved; or this is one of several
                processes without a process group.
        """
        self._own_location = os.fspath(location or "")
        self._settings = settings = rank_settings()
        location = settings.location or self._own_location
        if not location:
            raise ValueError("CheckpointManager needs a location: a directory for the checkpoints")
        if settings.location:
            local_tier = settings.local_tier or None
        self._all_tiers = open_tiers(location, os.fspath(local_tier) if local_tier is not None else None)
        self._local_keep_last = local_keep_last
        self._resume = resume_policy(settings.resume or str(resume if resume is not None else "auto"))
        cadence = Cadence(snapshot_steps, save_steps, save_minutes, overhead_cap)
        self._clock = CadenceClock(cadence, time.monotonic(), settings.num_failures, settings.observed_s)
        self._memory_limit = parse_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit
        self.retention = Retention(keep_last, keep_every, best_metric, greater_is_better)
        distributed = dist.is_available() and dist.is_initialized()
        if not distributed and "LOCAL_RANK" in os.environ and int(os.environ.get("WORLD_SIZE") or 1) > 1:
            # Each of them would take itself for rank 0 of one, and write the same checkpoints.
            raise CheckpointError(
                f"{os.environ['WORLD_SIZE']} processes were started (WORLD_SIZE), but torch.distributed is not "
                "initialized: call torch.distributed.init_process_group() before the CheckpointManager is made, or "
                "start one process (--nproc-per-node 1)"
            )
        self.rank = dist.get_rank() if distributed else 0
        self.world_size = dist.get_world_size() if distributed else 1
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0")) if distributed else 0
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)) if distributed else 1
        # Groups of our own: collectives here must never interleave with the gradients'.
        self._group, agreement_group, self._copy_group = (_new_group(self.world_size) for _ in range(3))
        self._flag_sync = FlagSync(agreement_group)
        self._own_agent: AgentProcess | None = None
        self._connection: tuple[AgentClient, Snapshotter, Tiers] | None = None
        self._options: dict[str, Any] = {"overlap": overlap, "check_replicas": check_replicas}
        self._stage = Stage()
        # Configuration and tokenizer: part of every checkpoint.
        self.static_files: dict[str, bytes] = {}
        self._start = (0, 0.0)
        # Seconds in which a state was chosen, read and loaded.
        self._restore_s = 0.0
        self._phase, self._step = Phase.STARTING, 0
        self._num_beats = 0
        # Since the ranks asked each other the last time.
        self._steps_seen, self._asked_at = 0, time.monotonic()
        # When the step that runs now began; None where its time will say nothing about the next one's.
        self._step_began: float | None = None
        self._closed = self._stopped = False
        # Classes of what DDP's communication hooks remember.
        self._hook_states: list[str] = []
        # Positions in the loaders that `batches` was given, in that order; and those of the checkpoint.
        self._cursors: list[LoaderCursor] = []
        self._restored_positions: list[Any] = []
        self._restored_ranks = self.world_size
        # The last step that `step` was told of.
        self._ended_step = self._ended_samples = 0
        self._ended_metrics: Mapping[str, float] | None = None
        self._reported_at = 0.0
        # Trained to its end, says who drives it.
        self.finished = False
        # A step whose commit somebody waits to be told of by `Due`, and the one of which all were told last.
        self.awaited: int | None = None
        self._answered: int | None = None
        self.track(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, states=states)
        stop_signal.begin_reading()

    @property
    def scratch(self) -> Path:
        """A folder on this machine for what this process may not live to remove."""
        return self._client.directory

    @property
    def _client(self) -> AgentClient:
        return self._opened()[0]

    @property
    def _snapshotter(self) -> Snapshotter:
        return self._opened()[1]

    @property
    def _tiers(self) -> Tiers:
        return self._opened()[2]

    def _opened(self) -> tuple[AgentClient, Snapshotter, Tiers]:
        """Reach the node's agent, or start one; every rank at the same time.

        Raises:
            AgentUnavailable: the agent cannot be reached or started.
        """
        if self._connection is None:
            self._stage = STAGES.enter(self._own_location, supervised=bool(self._settings.location))
            tiers = self._all_tiers.inside(self._stage)
            pinning = Pinning(device.register, device.unregister, self._say_pinned) if device.can_pin() else None
            client = self._connect(tiers, pinning.release if pinning is not None else lambda _: None)
            ranks = Ranks(self.rank, self.world_size, self.local_rank, self.local_world_size, self._copy_group)
            self._connection = (client, Snapshotter(client, tiers, ranks, pinning=pinning, **self._options), tiers)
            self._say_where(tiers)
        return self._connection

    def _say_pinned(self, nbytes: int, seconds: float, complete: bool) -> None:
        if self.rank == 0:
            event = {"event": "pinned", "nbytes": nbytes, "seconds": round(seconds, 3), "complete": complete}
            # Training finds out by itself that the agent is gone.
            with contextlib.suppress(CheckpointError):
                self._client.announce(event)

    def _say_where(self, tiers: Tiers) -> None:
        """Where a supervisor has chosen another place than the script: there the script by itself would not look."""
        kept, own = tiers.durable.location, self._own_location
        elsewhere = self._settings.location and own and Path(own).absolute() != Path(kept).absolute()
        # Once in a run's life, not at each restart.
        if self.rank == 0 and elsewhere and self._settings.attempt == 1:
            text = (
                f"checkpoints are kept at {kept}, not at {own}, as this runs under a supervisor; "
                f"with {LOCATION_ENV}={kept} plain torchrun or python resumes from them, too"
            )
            if Path(own).is_dir() and (steps := Catalog(LocalStorage(Path(own))).committed_steps()):
                text += (
                    f". {own} holds checkpoints up to step {steps[-1]}, from which this run does not resume; "
                    f"for that, runner start --set checkpoint.location={own}"
                )
            print(f"checkpointing: {text}", file=sys.stderr, flush=True)

    def track(
        self,
        *,
        model: Any,
        optimizer: Any,
        scheduler: Any = None,
        scaler: Any = None,
        states: Mapping[str, Any] | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """Set what is saved and restored. A DDP wrapper is looked through.

        Args:
            adapter: the part of the model that is trained, where the rest is not to be saved.

        State that FSDP2 has sharded is saved and restored whole; each machine must hold all of it among its ranks.

        Raises:
            ValueError: a name in `states` is taken.
            CheckpointError: the model or the optimizer is of a kind that cannot be saved.
        """
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            self._hook_states = sorted({type(state).__name__ for state in hook_states(model) if _has_memory(state)})
            model = model.module
        self._train_state = TrainState(model, optimizer, scheduler, scaler, dict(states or {}), adapter)

    # -- resuming ------------------------------------------------------------------------------------------------

    def choose(self, *, on_device: bool | None = None) -> RestorePoint | None:
        """Agree with all ranks on the checkpoint to go on from; None starts afresh. Changes no training state.

        Args:
            on_device: the model will be on an accelerator, to which its state is copied from memory that all ranks
                share; None: by where it is now.

        Raises:
            NoValidCheckpoint: there are checkpoints, but none can be loaded.
        """
        self._snapshotter.settle()
        self._beat(Phase.RESTORING, 0)
        if on_device is None:
            on_device = self._train_state.model is not None and self._train_state.on_gpu
        with self._restoring():
            point = choose(
                self._tiers,
                self._resume,
                self._group,
                self.rank,
                self.world_size,
                self._client,
                private=not on_device,
                local_rank=self.local_rank,
                local_world_size=self.local_world_size,
            )
        if point is not None and self.rank == 0 and not self._settings.agent_socket:
            # A supervisor says it itself.
            print(f"checkpointing: resumed from step {point.step} ({point.place})", file=sys.stderr, flush=True)
        return point

    @property
    def stage_name(self) -> str:
        """Of a supervised run's later trainings; empty for its first one."""
        self._opened()
        return self._stage.name

    @property
    def starting_folder(self) -> str | None:
        """The checkpoint of another run that the user wants to start from (`CHECKPOINT_RESUME_FROM`).

        It is for the run's first training: what a script trains after that begins with what the script gives it.
        """
        self._opened()
        return self._settings.resume_from or None if self._stage.number == 1 else None

    def starting_point(self) -> RestorePoint | None:
        """What `starting_folder` holds; None without one.

        Raises:
            CheckpointError: it was not written by this library, or is damaged.
        """
        folder = self.starting_folder
        if folder is None:
            return None
        found = own_checkpoint(Path(folder))
        if found is None:
            raise CheckpointError(
                f"--resume-from {folder}: no checkpoint of this library, which is all that a CheckpointManager reads; "
                "for one of a stock Trainer use checkpointing.transformers.resilient"
            )
        storage, step = found
        return read_checkpoint(storage, step, self.rank, self.world_size)

    def resume(self, total_steps: int | None = None) -> int:
        """Restore everything tracked and the generators; returns the step to continue from, 0 for a fresh start.

        Args:
            total_steps: steps that training is to have at its end, for progress displays; None if not known.
        """
        point = self.choose() or self.starting_point()
        if point is not None:
            self.restore_model(point)
            self.restore_optimizer(point)
            self.restore_rng(point)
            self._restored_positions, self._restored_ranks = self.positions_in(point), point.world_size
            point.close()
        step = point.step if point is not None else 0
        self.begin(step, total_steps)
        return step

    def positions_in(self, point: RestorePoint) -> list[Any]:
        """The loaders' positions that a checkpoint holds, this rank's or, where it has none, rank 0's.

        Raises:
            InvalidCheckpoint: the file makes no sense.
        """
        names = (state_name(self.rank, self.world_size), state_name(0, 2), state_name(0, 1))
        name = next(filter(point.has, names), None)
        if name is None:
            return []
        with point.reading(name):
            found = point.torch_object(name)
            if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
                raise ValueError("it is no list of positions")
            return found

    def batches(self, loader: Any) -> Iterator[Any]:
        """Iterate over a loader without end, epoch after epoch, from where the checkpoint was made.

        For a loop such as `for step, batch in zip(range(manager.resume(), total), manager.batches(loader))`; every
        batch that was handed out counts as used by the next `step`. The loader's own order is kept, also across
        epochs; where its sampler, batch sampler or data set has `set_epoch`, it is called. What is drawn at random
        while a batch is made depends on the batch's number, so that workers need not be in step with training. To be
        called after `resume`, in the same order for several loaders.

        Args:
            loader: a torch `DataLoader`, or torchdata's `StatefulDataLoader`, whose state is kept where its data set
                has no length.

        Raises:
            CheckpointError: it is another kind of loader; or, while iterating, the resumed order is another one.
        """
        cursor = LoaderCursor(loader, seed=torch.initial_seed(), rank=self.rank)
        if self._restored_ranks != self.world_size:
            cursor.other_ranks = (self._restored_ranks, self.world_size)
        number = len(self._cursors)
        self._cursors.append(cursor)
        positions = self._restored_positions
        return self._batches(cursor, positions[number] if number < len(positions) else None)

    def _batches(self, cursor: LoaderCursor, position: Mapping[str, Any] | None) -> Iterator[Any]:
        epoch = 0
        if position is not None:
            try:
                epoch, _ = cursor.resume(position)
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"the checkpoint's position in {cursor.name} makes no sense: {error}") from None
        while True:
            cursor.set_epoch(epoch)
            # What the loader draws on its way to the position must not be taken from training.
            training = rng.state(self.world_size) if cursor.resumes_mid_epoch else None
            iterator = cursor.iterate()
            batch = next(iterator, _END)
            if training is not None:
                rng.set_state(training)
            elif batch is _END:
                raise ValueError(f"the loader of {cursor.name} has no batch")
            while batch is not _END:
                cursor.consume(1)
                yield batch
                batch = next(iterator, _END)
            epoch += 1

    def restore_model(self, point: RestorePoint) -> None:
        """Load the weights.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        self._snapshotter.settle()
        with self._restoring():
            self._train_state.restore_model(point, self._place)

    def restore_optimizer(self, point: RestorePoint) -> None:
        """Load the state of optimizer, scheduler, scaler, and of the further `states`."""
        self._snapshotter.settle()
        with self._restoring():
            self._train_state.restore_optimizer(point, self.rank, self._place)

    def _place(self, state: Any) -> Any:
        """Bring a state that all ranks have to the model's device, where each would have to copy all of it."""
        model, optimizer = self._train_state.model, self._train_state.optimizer
        if model is None or has_sharded(model) or not isinstance(optimizer, torch.optim.Optimizer):
            return state
        where = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        if not broadcast.is_worthwhile(where, self.world_size, self.local_world_size):
            return state
        return broadcast.to_device(state, where, self.rank, self.world_size)

    def restore_states(self, point: RestorePoint, names: Set[str]) -> None:
        """Load some of the further `states` again, as `restore_optimizer` has done."""
        with self._restoring():
            self._train_state.restore_states(point, self.rank, names)

    def restore_rng(self, point: RestorePoint) -> None:
        """Set this rank's generators; call it before the first batch is drawn.

        Raises:
            InvalidCheckpoint: the file makes no sense.
        """
        name = rng.file_name(self.rank, self.world_size)
        if point.has(name):
            with point.reading(name):
                rng.set_state(point.torch_object(name))
        else:
            logger.warning(
                "%s was written by %d ranks: rank %d has no generator state in it and goes on with a fresh one",
                point.place,
                point.world_size,
                self.rank,
            )

    @contextlib.contextmanager
    def _restoring(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._restore_s += time.monotonic() - began

    def load_best(self, last_step: int, *, together: bool = False, preferred: int | None = None) -> int | None:
        """Load the model of the best checkpoint by `best_metric`, and nothing else of it.

        One that was damaged is passed over, with a warning.

        Args:
            last_step: of the weights that the model has now; they need not be read.
            preferred: the step that is the best, where the caller knows; others are taken where it cannot be read.
            together: all ranks call it, and all load the same; else this rank alone.

        Returns:
            The step; None where there is none that carries the metric and can be read, and the model is as it was.

        Raises:
            CheckpointError: it is of another model.
        """
        group = self._group if together else None
        order: list[list[int]] = [[]]
        if group is None or self.rank == 0:
            manifests = (entry.manifest for entry in self._tiers.catalog.entries() if entry.manifest is not None)
            best = best_first(manifests, self.retention)
            order = [[preferred, *(step for step in best if step != preferred)] if preferred is not None else best]
        if group is not None:
            dist.broadcast_object_list(order, src=0, group=group)
        for step in order[0]:
            if step == last_step:
                return step
            point = self._read_valid(step)
            found = [point is not None]
            if group is not None:
                found = [False] * self.world_size
                dist.all_gather_object(found, point is not None, group=group)
            if point is not None:
                if all(found):
                    self._train_state.restore_model(point)
                point.close()
            if all(found):
                return step
        return None

    def folder_of(self, step: int) -> str:
        """Where the durable checkpoint of a step lies: a path or a URL."""
        return f"{self._tiers.durable.location}/checkpoint-{step}"

    def _read_valid(self, step: int) -> RestorePoint | None:
        """A checkpoint from whichever tier has it whole."""
        try:
            entries = [entry for entry in self._tiers.catalog.entries() if entry.step == step and entry.manifest]
        except CheckpointError as error:
            logger.warning("step %d is passed over: %s", step, error)
            return None
        for entry in entries:
            try:
                return read_checkpoint(entry.storage, step, self.rank, self.world_size)
            except (InvalidCheckpoint, StorageUnreachable) as error:
                logger.warning("step %d is passed over: %s", step, error)
        return None

    # -- training ------------------------------------------------------------------------------------------------

    def begin(self, start_step: int, total_steps: int | None = None) -> None:
        """Say that the training loop starts, at this step.

        Args:
            total_steps: see `resume`.

        Raises:
            CheckpointError: the model is sharded over several machines, or something in `states` is sharded.
        """
        self._start = (start_step, machine_clock())
        if self.rank == 0:
            self._client.announce({"event": "training_started", "step": start_step, "total_steps": total_steps})
        if self.rank == 0 and self._restore_s:
            self._client.announce({"event": "restored", "step": start_step, "seconds": round(self._restore_s, 3)})
        self._restore_s = 0.0
        self._beat(Phase.TRAINING, start_step)
        if self._hook_states and not self._train_state.states and self.rank == 0:
            logger.warning(
                "what DDP's communication hook remembers (%s) is in no checkpoint: a resumed run begins with an empty "
                "memory. Give it in `states` as an object with state_dict and load_state_dict",
                ", ".join(self._hook_states),
            )
        self._watch_compiler()
        if self._train_state.model is not None and self._train_state.optimizer is not None:
            self._train_state.check(self.local_world_size)
            self._snapshotter.reserve(self._train_state.expected_bytes())
        # What was just restored need not be saved again.
        self._snapshotter.last_step = start_step if start_step else -1

    def end_of_step(self, step: int) -> Due:
        """Heartbeat, and the agreement with all ranks on what is due now."""
        failpoint("training.step")
        now = time.monotonic()
        began, self._step_began = self._step_began, now
        self._beat(Phase.TRAINING, step, now - began if began is not None else 0.0)
        self._snapshotter.end_of_step()
        self._steps_seen += 1
        agreed = self._flag_sync.exchange(self._ask)
        snapshot_due, save_due = self._clock.due_by_step(step)
        return Due(
            Flag.STOP in agreed,
            save_due or Flag.SAVE in agreed,
            snapshot_due or Flag.SNAPSHOT in agreed,
            Flag.COMMITTED in agreed,
            Flag.NOT_COMMITTED in agreed,
        )

    def _ask(self) -> tuple[set[Flag], int]:
        """What this rank asks all for, and how many steps rank 0 proposes until they ask each other again."""
        wanted = {Flag.STOP} if self.stop_wanted else set()
        if self.rank != 0:
            return wanted, 1
        now = time.monotonic()
        price = self._snapshotter.costs.snapshot_s
        preparing = self._snapshotter.is_preparing
        due = self._clock.due_by_time(now, price, self._client.control.last_commit, preparing=preparing)
        wanted |= {flag for flag, wish in zip((Flag.SNAPSHOT, Flag.SAVE), due, strict=True) if wish}
        if self.awaited is not None and self.awaited != self._answered:
            last = self._client.control.last_commit.step
            if last >= self.awaited:
                # The newest commit hides those just before it.
                known = last == self.awaited or self.is_committed(self.awaited)
                wanted.add(Flag.COMMITTED if known else Flag.NOT_COMMITTED)
                self._answered = self.awaited
        step_s = (now - self._asked_at) / max(self._steps_seen, 1)
        self._steps_seen, self._asked_at = 0, now
        return wanted, max(1, min(int(_AGREE_EVERY_S / step_s), _MAX_INTERVAL))

    @property
    def stop_wanted(self) -> bool:
        """This rank has been asked to stop; what all do about it is agreed in `end_of_step`, or by `agree_to_stop`."""
        return stop_signal.requested() or self._client.control.stop_requested

    @property
    def is_closed(self) -> bool:
        return self._closed

    def is_committed(self, step: int) -> bool:
        """Whether storage has the checkpoint of a step; asks it."""
        try:
            return step in self._tiers.catalog.committed_steps()
        except OSError:
            return False

    def check_way(self, start_step: int) -> None:
        """That nothing lies where the checkpoints after `start_step` go.

        Raises:
            CheckpointError: another writer's checkpoints do, which are neither read nor touched.
        """
        foreign = [step for storage in self._tiers.nearest_first for step in storage.foreign_steps()]
        in_the_way = sorted({step for step in foreign if step > start_step})
        if in_the_way:
            names = ", ".join(f"checkpoint-{step}" for step in in_the_way[:3]) + (", …" if in_the_way[3:] else "")
            place = self._tiers.durable.location
            raise CheckpointError(
                f"{place} holds checkpoints that this library has not written ({names}): they are left as they are. "
                f"Start from one (train({place + '/checkpoint-' + str(in_the_way[-1])!r}), or --resume-from), or train "
                "in another output_dir"
            )

    def follow(self, cursor: LoaderCursor) -> None:
        """Have a loader's position saved, which the caller drives."""
        self._cursors.append(cursor)

    def forget_positions(self) -> None:
        """Follow no loader any more."""
        self._cursors.clear()

    @property
    def stall_s(self) -> float:
        """Seconds that this rank's training has waited for snapshots so far."""
        return self._snapshotter.stall_s

    def agree_to_stop(self) -> bool:
        """Outside steps: whether any rank had been asked to stop when this was called the last time.

        Every rank must call it equally often. What is agreed here, the next `end_of_step` does not say again.
        """
        return Flag.STOP in self._flag_sync.exchange(lambda: ({Flag.STOP} if self.stop_wanted else set(), 1), now=True)

    def announce_batch(self, micro_batch: int, accumulation: int) -> None:
        """Tell a supervisor how a step is cut, so that it can cut finer where memory runs out.

        Args:
            micro_batch: samples per rank in one forward and backward.
            accumulation: of those in one step.
        """
        if self.rank == 0:
            self._client.announce({"event": "batch_shape", "micro_batch": micro_batch, "accumulation": accumulation})

    def pause(self) -> None:
        """Say that what runs now is no step (an evaluation, a change of epoch), and alive.

        A hang watchdog then waits longer, until the next step; call it again as a sign of life.
        """
        self._step_began = None
        self._beat(Phase.IDLE, self._step)

    def begin_step(self) -> None:
        """Say that a step begins. Only needed after `pause`; without it, the next step's end says so."""
        if self._phase is Phase.IDLE:
            self._beat(Phase.TRAINING, self._step)

    def step(self, step: int, samples_consumed: int | None = None, metrics: Mapping[str, float] | None = None) -> None:
        """To be called when optimizer step number `step` is done: saves when due, stops when all have agreed to.

        Args:
            samples_consumed, metrics: see `save`.

        Raises:
            Preempted: after an agreed stop, once the state is committed.
        """
        due = self.end_of_step(step)
        samples = step if samples_consumed is None else samples_consumed
        self._ended_step, self._ended_samples, self._ended_metrics = step, samples, metrics
        now = time.monotonic()
        if metrics and now - self._reported_at >= _REPORT_EVERY_S:
            self._reported_at = now
            self.report(step, metrics)
        if due.stop or due.save:
            self.save(step, samples, metrics=metrics, wait=due.stop)
        elif due.snapshot:
            self.save(step, samples, metrics=metrics, commit=False)
        if due.stop:
            self.stop(step)

    def report(self, step: int, values: Mapping[str, Any]) -> None:
        """Tell a supervisor what was measured at a step, for status, report and metrics; rank 0's values count.

        Args:
            values: by name; `loss`, `learning_rate`, `grad_norm` and `tokens_per_s` are known to them, and names that
                begin with `eval_` are of an evaluation. What is no finite number is left out.
        """
        if self.rank != 0:
            return
        numbers = {name: float(value) for name, value in values.items() if _is_finite(value)}
        if "loss" in numbers:
            self._client.announce({**numbers, "event": "log", "step": step})
        elif "eval_loss" in numbers:
            self._client.announce({**numbers, "event": "evaluated", "step": step})

    def wants(self, step: int) -> bool:
        """Whether `save` would do anything: this step has not been saved yet."""
        return step != self._snapshotter.last_step

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
        """Snapshot the state of a step; the copy runs beside what follows, up to the next optimizer step.

        Nothing but an optimizer may change the tracked state before that.

        Args:
            samples_consumed: the data cursor, in samples drawn by all ranks.
            files: this rank's own small files, by name; callables are called beside training.
            shared_files: small files that are equal on all ranks; only each node's local rank 0 needs to give them.
            metrics: what was measured at this step, by name; says which checkpoint is the best. Only rank 0's count.
            wait: take it even if that means waiting for an arena; without, it is skipped when all are busy.
            commit: have it committed to storage too; else it is held in memory until a newer one is.
            generators: an earlier `rng.state` to be saved instead of the present one.
        """
        if not self.wants(step):
            return
        self._step_began = None
        self._beat(Phase.SAVING, step)
        self._clock.done(time.monotonic(), commit=commit)
        generators_file = functools.partial(torch_bytes, dict(generators or rng.state(self.world_size)))
        own = {**(files or {}), rng.file_name(self.rank, self.world_size): generators_file}
        if self._cursors:
            positions = [cursor.state() for cursor in self._cursors]
            own[state_name(self.rank, self.world_size)] = functools.partial(torch_bytes, positions)
        request = Request(
            step,
            samples_consumed,
            own,
            shared_files or {},
            self.retention,
            {name: value for name, value in (metrics or {}).items() if math.isfinite(value)},
            wait=wait,
            commit=commit,
        )
        self._snapshotter.take(self._train_state, request, self.static_files)
        self._step_began = time.monotonic()
        self._beat(Phase.TRAINING, step)

    def wait_for_commit(self) -> None:
        """Block until the last snapshot that is to be committed is.

        Raises:
            CommitFailed: storage refused it.
        """
        self._snapshotter.settle()
        if self._snapshotter.direct_error is not None:
            raise CommitFailed(self._snapshotter.direct_error)
        if self._snapshotter.committing_step is not None:
            error = self._client.wait(self._snapshotter.committing_step)
            if error is not None:
                raise CommitFailed(error)

    def stop(self, step: int) -> None:
        """End this rank together with all others, once the snapshot of `step` is committed.

        Raises:
            Preempted: always, after success.
            CommitFailed: storage refused the snapshot.
        """
        self._stopped = True
        self.close()
        raise Preempted(step)

    def close(self) -> None:
        """End of training: wait for the last commit; leave nothing in flight."""
        if self._closed:
            return
        self._closed = True
        if self._connection is None:
            # Never used.
            stop_signal.end_reading(stopped=False)
            return
        step = self._step
        try:
            self._close(step)
        finally:
            if self._own_agent is not None:
                self._own_agent.close()

    def _close(self, step: int) -> None:
        self._beat(Phase.SAVING, step)
        self._flag_sync.drain()
        self._commit_last_step()
        self.wait_for_commit()
        if self._group is not None:
            # Nobody leaves before everybody's commit is known: an early exit would look like a failure to the launcher.
            dist.barrier(group=self._group)
        self._snapshotter.close()
        self._beat(Phase.DONE, step)
        stop_signal.end_reading(stopped=self._stopped)
        self._client.close()
        # Under a supervisor a loop that has ended is over: who makes another manager begins another stage.
        finished = not self._stopped and (self.finished or (self._ended_step > 0 and bool(self._settings.location)))
        STAGES.leave(self._own_location, step, finished=finished)

    def _commit_last_step(self) -> None:
        """What `step` has ended last is committed, also where it was not due, or was skipped as all memory was busy.

        Not in the middle of another step, nor while an exception is on its way: then the state is of no step.
        """
        step = self._ended_step
        if not step or self._stopped:
            return
        self._snapshotter.settle()
        unfit = sys.exc_info()[0] is not None or self._snapshotter.optimizer_has_stepped
        missing = self._snapshotter.committing_step != step and self._start[0] != step
        if self._group is not None:
            # All do it or none does; those of other machines may have had memory for it.
            wishes = torch.tensor([int(unfit), int(missing)])
            dist.all_reduce(wishes, op=dist.ReduceOp.MAX, group=self._group)
            unfit, missing = map(bool, wishes.tolist())
        if not missing:
            return
        if unfit:
            logger.warning("step %d is not committed: close() was called in the middle of a later step", step)
            return
        self._snapshotter.last_step = -1
        self.save(step, self._ended_samples, metrics=self._ended_metrics, wait=True)

    # -- inside --------------------------------------------------------------------------------------------------

    def _connect(self, tiers: Tiers, on_detach: Callable[[SharedMemory], None]) -> AgentClient:
        socket_path, attempt = self._settings.agent_socket, self._settings.attempt
        if not socket_path:
            socket_path, attempt = self._start_own_agent(tiers)
        return AgentClient(
            socket_path,
            attempt,
            self.rank,
            self.local_rank,
            self.local_world_size,
            fetch=self._resume == "auto",
            stage=self._stage,
            on_detach=on_detach,
        )

    def _start_own_agent(self, tiers: Tiers) -> tuple[str, int]:
        """Local rank 0 starts the node's agent; its peers learn the address from it."""
        mine: tuple[str, int] | str | None = None
        if self.local_rank == 0:
            try:
                catalog = tiers.catalog
                manifest = next((entry.manifest for entry in catalog.scan() if entry.manifest), None)
                run_id = manifest.run_id if manifest is not None else uuid.uuid4().hex
                attempt = catalog.newest_attempt() + 1
                self._own_agent = AgentProcess.start(
                    tiers.durable.location,
                    run_id,
                    local_tier=tiers.local.location if tiers.local is not None else None,
                    local_keep_last=self._local_keep_last,
                    commits=self.rank == 0,
                    memory_limit=self._memory_limit,
                )
                mine = (self._own_agent.socket_path, attempt)
            except (CheckpointError, OSError) as error:
                mine = str(error)
        everyone: list[Any] = [mine]
        if self._group is not None:
            everyone = [None] * self.world_size
            dist.all_gather_object(everyone, mine, group=self._group)
        leader = everyone[self.rank - self.local_rank]
        if isinstance(leader, str):
            raise CheckpointError(leader)
        return leader[0], leader[1]

    def _beat(self, phase: Phase, step: int, step_s: float = 0.0) -> None:
        self._phase, self._step = phase, step
        self._num_beats += 1
        start_step, start_time = self._start
        beat = Heartbeat(phase, step, machine_clock(), start_step, start_time, step_s, self._num_beats)
        self._client.control.write(self.local_rank, beat)

    def _watch_compiler(self) -> None:
        """A step in which torch.compile works takes minutes: say so, in the first one and in any later one."""
        if "torch._dynamo" not in sys.modules:
            return
        from torch._dynamo.callback import callback_handler

        def compiling(_: object) -> None:
            if self._phase is Phase.TRAINING:
                self._step_began = None
                self._beat(Phase.COMPILING, self._step)

        def compiled(_: object) -> None:
            if self._phase is Phase.COMPILING:
                self._beat(Phase.TRAINING, self._step)

        callback_handler.register_start_callback(compiling)
        callback_handler.register_end_callback(compiled)


def _has_memory(hook_state: object) -> bool:
    """Whether a communication hook's state holds tensors, or is made to."""
    return any(isinstance(value, (torch.Tensor, torch.nn.Module, dict)) for value in vars(hook_state).values())


def _is_finite(value: object) -> bool:
    """Whether it is a finite number, not a bool; a tensor with one element counts."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and math.isfinite(value.item())
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _new_group(world_size: int) -> dist.ProcessGroup | None:
    return dist.new_group(backend="gloo") if world_size > 1 else None
