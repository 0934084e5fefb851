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
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch

from checkpointing.agent.events import BatchShape
from checkpointing.commit.retention import DEFAULT_KEEP_LAST, RetentionOptions, retention_of
from checkpointing.commit.tiers import DEFAULT_LOCAL_KEEP_LAST
from checkpointing.data.cursor import LoaderCursor
from checkpointing.data.dealing import check_virtual_ranks
from checkpointing.errors import Preempted
from checkpointing.exact.gradients import ExactGradients, Share, Shares
from checkpointing.exact.self_test import SelfTest
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.host.environment import rank_settings
from checkpointing.host.failpoints import failpoint
from checkpointing.host.heartbeat import Phase
from checkpointing.manager import rank_signals
from checkpointing.manager.data_positions import DataPositions
from checkpointing.manager.node_services import AgentConnection, Connect, NodeServices
from checkpointing.manager.options import Options
from checkpointing.manager.proving import Proving
from checkpointing.manager.rehearsal import RehearsalOver, ends_rehearsal, rehearsal
from checkpointing.manager.restoring import Restoring
from checkpointing.manager.script_state import ScriptState
from checkpointing.manager.slow_ranks import SpeedComparison, compare_speeds
from checkpointing.manager.spikes import SkippedSteps
from checkpointing.manager.step_protocol import EXCHANGE_EVERY_S, Due, Measured, StepProtocol
from checkpointing.manager.step_saves import StepSaves
from checkpointing.manager.tracked import Tracked
from checkpointing.process.joining import check_same_steps
from checkpointing.process.ranks import FlagSync, Ranks
from checkpointing.snapshot.cadence import DEFAULT_OVERHEAD_CAP, Auto, Cadence, CadenceClock
from checkpointing.snapshot.request import SmallFile
from checkpointing.state.adapter import Adapter


def micro_batch_divisor() -> int:
    """Return how many parts to cut a micro-batch into, and how many times more of them a step is to accumulate.

    1 until an attempt has run out of memory; a supervisor then doubles it. For bare loops: `resilient` does it itself.
    """
    return rank_settings().micro_batch_divisor


def skipped_steps() -> SkippedSteps:
    """Return the steps that training is to skip without computing anything, since their samples failed it twice.

    None until a supervisor says so. For bare loops: `resilient` does it itself.
    """
    return SkippedSteps(rank_settings().skipped_steps)


def unfinished_training() -> tuple[int, int] | None:
    """Return the last step and the number of steps of a training loop in this process that has begun and not ended.

    None if there is none, or if it did not say how many steps it takes.
    """
    manager = CheckpointManager._newest_in_training()
    total = manager._total_steps if manager is not None else None
    if manager is None or total is None or manager._node.heartbeat.step >= total:
        return None
    return manager._node.heartbeat.step, total


class CheckpointManager:
    """Saves, resumes and stops a training loop. One per rank.

    Every rank calls all methods at the same step, from the thread that trains.

    Attributes:
        rank: Number of this rank among all.
        world_size: Number of all ranks.
        retention: Which checkpoints are kept.
        restoring: What is restored, in the parts that an integration restores at different moments.
        proving: Records steps, and compares those that are recomputed.
        script: What the script keeps besides, as far as it can be found.
        finished: Set by an integration: training has reached its end.
    """

    # One that was left behind, as a search for parameters leaves a trial, says nothing once another one trains.
    _newest_in_training: ClassVar[Callable[[], CheckpointManager | None]] = staticmethod(lambda: None)

    def __init__(
        self,
        location: str | os.PathLike[str] | None = None,
        *,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        states: Mapping[str, Any] | None = None,
        pipeline: bool = False,
        save_steps: int | Auto | None = None,
        save_minutes: float | None = None,
        snapshot_steps: int | Auto | None = "auto",
        overhead_cap: float = DEFAULT_OVERHEAD_CAP,
        local_tier: str | os.PathLike[str] | None = None,
        local_keep_last: int = DEFAULT_LOCAL_KEEP_LAST,
        resume: str | int | None = None,
        memory_limit: int | str | None = None,
        overlap: bool | None = None,
        check_replicas: bool = True,
        buddy_copies: bool = True,
        allow_non_finite: bool = False,
        virtual_ranks: int | Auto | None = None,
        **retention: Unpack[RetentionOptions],
    ) -> None:
        """Set what is saved, where, and how often.

        The node's checkpoint agent is reached, or started where there is no supervisor, when the manager is first
        used: several may be made before the first one trains. One of this process trains at a time. Under a supervisor
        each further location is a stage of the run, kept in a folder of its own inside the supervisor's location, in
        the order in which they are first used.

        Args:
            location: A directory, or a URL: `file://`, `s3://bucket/prefix`, or another that fsspec knows. A
                supervisor's choice, or else `CHECKPOINT_LOCATION`, takes precedence.
            model: The model that is saved and restored; may be given later by `track`, like the next three.
            optimizer: Its optimizer.
            scheduler: Its learning rate scheduler; several in a list or a dict.
            scaler: Its gradient scaler.
            states: Further objects with `state_dict` and `load_state_dict` (a moving average of the weights, say), by
                name; each is kept in `<name>.pt`. They may change at any moment: training waits while they are copied.
                Where the ranks' differ, each rank's is kept. On another number of ranks that is refused, unless the
                object has `load_state_dicts(states)`, which each rank calls with the state dicts of all, by rank.
            pipeline: With pipeline parallelism: `model` is this rank's stage, whose layers have the names that they
                have in the whole model, and `optimizer` is that of the stage. All ranks together write one checkpoint
                of the whole model, which resumes on any number of stages, or without a pipeline.
            save_steps: Steps between commits; "auto" chooses by measured cost.
            save_minutes: Maximum minutes between commits.
            snapshot_steps: Steps between snapshots in memory, from which a new attempt resumes; "auto" (default)
                chooses by measured cost, None makes none but for commits.
            overhead_cap: Share of the run's time that "auto" may spend.
            local_tier: A fast directory of this machine: checkpoints are committed there first, and copied to
                `location` in the background. A supervisor's choice takes precedence.
            local_keep_last: Number of newest checkpoints to keep there.
            resume: "auto" (default), "never", or a step. A supervisor's choice, or else `CHECKPOINT_RESUME`, takes
                precedence.
            memory_limit: Memory that snapshots may take on this node, in bytes or as text ("8GiB"); default: half of
                what is free. A supervisor's choice takes precedence.
            overlap: Copy during training (True), or while it waits (False); None chooses by measured cost.
            check_replicas: Compare the ranks' parameters and optimizer state before each snapshot. Where they differ, a
                save is refused, and a snapshot in memory skipped. False takes a part of the state from each rank.
            buddy_copies: Where no node holds all of the state, have each node keep a copy of another one's part in
                memory, so that losing a node loses no snapshot. Takes as much memory and network again.
            allow_non_finite: Keep a state whose parameters or optimizer state hold NaN or infinity; otherwise
                `NonFinite` is raised, nothing of that step is kept, and a supervisor resumes from the step before.
                Frozen parameters and buffers may always hold them.
            virtual_ranks: Number of virtual ranks that compute each step, with the same bits on any number of ranks up
                to that; see `shares`. "auto" is that of the checkpoint, or else of the ranks.
            **retention: Which checkpoints to keep (see `Retention`): `keep_last`, the number of newest ones, 3 by
                default, None for all; in addition every one whose step is a multiple of `keep_every`, and the best one,
                or the `keep_best` best ones, by `best_metric`, one of the metrics given to `save`, where
                `greater_is_better` says how it compares.

        Raises:
            TypeError: An argument is unknown.
            ValueError: An option is not allowed, or there is no location.
            CheckpointError: The model or the optimizer is of a kind that cannot be saved; or this is one of several
                processes without a process group.
        """
        check_virtual_ranks(virtual_ranks)
        options = Options.resolve(
            rank_settings(),
            location=location,
            local_tier=local_tier,
            local_keep_last=local_keep_last,
            resume=resume,
            memory_limit=memory_limit,
            cadence=Cadence(snapshot_steps, save_steps, save_minutes, overhead_cap),
            retention=retention_of({"keep_last": DEFAULT_KEEP_LAST, **retention}, CheckpointManager),
            overlap=overlap,
            check_replicas=check_replicas,
            buddy_copies=buddy_copies,
            allow_non_finite=allow_non_finite,
        )
        self._assemble(options, Ranks.of_this_process())
        self.track(
            model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, states=states, pipeline=pipeline
        )
        self._virtual_ranks, self._wrapped = virtual_ranks, model
        self._chose_retention = "keep_last" in retention
        rank_signals.begin_reading()

    def _assemble(self, options: Options, ranks: Ranks, connect: Connect = AgentConnection) -> None:
        """Make the parts; all ranks call this together."""
        settings, self._chose_retention = options.settings, True
        self._options, self._ranks = options, ranks
        self.rank, self.world_size, self.retention = ranks.rank, ranks.world_size, options.retention
        self._node = NodeServices(options, ranks, connect)
        self._tracked, self._positions = Tracked(ranks), DataPositions(ranks)
        self.script = ScriptState(ranks, self._tracked, lambda: self._positions.cursors)
        self.proving = Proving(options, ranks, self._node, self._tracked, self.script.changed)
        self._saving = StepSaves(ranks, self._node, self._tracked, self._positions, self.proving, self.script)
        self.restoring = Restoring(
            options, ranks, self._node, self._tracked, self._positions, self.proving, self.script
        )
        self._protocol = StepProtocol(
            FlagSync(ranks.with_new_group().group),
            CadenceClock(options.cadence, time.monotonic(), settings.num_failures, settings.observed_s),
            is_first=ranks.is_first,
            stop_wanted=lambda: self.stop_wanted,
            differs=lambda: self.proving.has_found_difference,
            saves_wanted=lambda: rank_signals.num_saves() + self._node.connection.client.control.saves_requested,
            measure=self._measure,
            is_committed=self.restoring.is_committed,
            # A rehearsal has too few steps to leave any out.
            every_s=EXCHANGE_EVERY_S if rehearsal() is None else 0.0,
        )
        self._speeds: SpeedComparison | None = None
        self._exact: ExactGradients | None = None
        # What the shares of the step are from.
        self._shares: Shares | None = None
        self._total_steps: int | None = None
        self._closed = self._stopped = self.finished = False

    # -- what is saved, and what is restored ---------------------------------------------------------------------------

    @property
    def static_files(self) -> dict[str, bytes]:
        """Configuration and tokenizer, by file name: part of every checkpoint."""
        return self._tracked.static_files

    @static_files.setter
    def static_files(self, files: dict[str, bytes]) -> None:
        self._tracked.static_files = files

    @property
    def scratch(self) -> Path:
        """A folder on this machine for files that this process may not live to remove."""
        return self._node.connection.client.directory

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
            scheduler: The learning rate scheduler; several in a list or a dict.
            scaler: The gradient scaler.
            states: Further objects with `state_dict` and `load_state_dict`, by name.
            adapter: The part of the model that is trained, where the rest is not to be saved.
            pipeline: The model is this rank's stage of a pipeline; all ranks call this together.

        Raises:
            ValueError: A name in `states` is taken.
            CheckpointError: The model or the optimizer is of a kind that cannot be saved.
        """
        self._tracked.track(model, optimizer, scheduler, scaler, states or {}, adapter, pipeline=pipeline)

    def resume(self, total_steps: int | None = None) -> int:
        """Restore everything tracked and the generators; return the step to continue from, 0 for a fresh start.

        Args:
            total_steps: Steps that training is to have at its end, for progress displays; None if not known.

        Raises:
            CheckpointError: The run counts on virtual ranks (`elastic.mode=exact`), and the manager has none.
        """
        # Refused before anything is restored.
        rank_settings().virtual_ranks_of(self._virtual_ranks)
        point = self.restoring.choose() or self.restoring.starting_point()
        if point is not None:
            self.restoring.restore(point)
        else:
            self.restoring.load_initial_weights()
        step = point.step if point is not None else 0
        self.begin(step, total_steps)
        self.proving.look_at_start()
        self.proving.watch(self._wrapped)
        return step

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
        return self.restoring.load_best(self.retention, last_step, together=together, preferred=preferred)

    # -- data ----------------------------------------------------------------------------------------------------------

    def batches(self, loader: Any, *, ahead: int | None = None) -> Iterator[Any]:
        """Iterate over a loader without end, epoch after epoch, from where the checkpoint was made.

        For a loop such as `for step, batch in zip(range(manager.resume(), total), manager.batches(loader))`; every
        batch that was handed out counts as used by the next `step`, but for those that are `ahead`. The loader's own
        order is kept, also across epochs; where its sampler, batch sampler or data set has `set_epoch`, it is called.
        What is drawn at random while a batch is made depends on the batch's number, so that workers need not be in
        step with training. Call this after `resume`, once for each loader, in the same order at every start, and draw
        in the thread that trains.

        Args:
            loader: A torch `DataLoader`, or torchdata's `StatefulDataLoader`, whose state is kept where its data set
                has no length.
            ahead: Number of batches that a prefetcher of the script's own has drawn, and no step has used yet,
                whenever `step` is called: a resumed run draws them again. None is 0, with a warning where more batches
                are drawn before the first step than for each later one.

        Raises:
            TypeError: It is several loaders, or an iterator.
            ValueError: The manager has virtual ranks, which take `shares`; or `ahead` is not a count.
            CheckpointError: It is another kind of loader; or, while iterating, the resumed order differs.
        """
        if self._virtual_ranks is not None:
            raise ValueError(
                "batches() knows no virtual ranks: iterate over shares(loader), or leave virtual_ranks out"
            )
        batches = self._positions.batches(loader, ahead)
        # What is drawn ahead enters the model in another step.
        return batches if ahead else self.proving.drawn(batches)

    def shares(self, loader: Any) -> Iterator[list[Share]]:
        """Iterate over steps without end: for each, what this rank's virtual ranks compute.

        In a loop such as `for step, shares in zip(range(manager.resume(), total), manager.shares(loader))`::

            for share in shares:
                with share:
                    loss(model(share.batch)).backward()
            optimizer.step()

        Then the parameters have the mean gradients of all virtual ranks, with the same bits on any number of ranks.
        There is one draw of shares per `step`: gradients are not accumulated over several.

        Args:
            loader: A plain DataLoader, the same on all ranks (no DistributedSampler): each of its batches is one
                virtual rank's micro-batch.

        Raises:
            TypeError: It is several loaders, or an iterator.
            ValueError: The manager has no virtual ranks.
            CheckpointError: The checkpoint was made with another number; there are more ranks; the loader's order may
                depend on their number; or the model is not one whose gradients can be summed in order. While
                iterating: buffers change in the first step (BatchNorm), or shares were left out, repeated, or have no
                gradients.
        """
        if self._virtual_ranks is None or self._wrapped is None:
            raise ValueError("shares() is for CheckpointManager(model=..., virtual_ranks=...)")
        chosen = rank_settings().virtual_ranks_of(self._virtual_ranks)
        dealing, steps = self._positions.dealt(loader, chosen if isinstance(chosen, int) else 0)
        batch_size = getattr(loader, "batch_size", None) or 1
        shape = BatchShape(micro_batch=batch_size, accumulation=dealing.largest, samples=dealing.virtual_ranks)
        self.announce_batch(shape)
        on_host = micro_batch_divisor() > 1
        self._exact = ExactGradients(self._wrapped, dealing.virtual_ranks, torch.initial_seed(), on_host=on_host)

        def drawn(shares: Shares) -> None:
            self._shares = shares

        return Shares(steps, self._exact, lambda: self._node.heartbeat.step, drawn)

    def follow(self, cursor: LoaderCursor, group_size: int = 1) -> None:
        """Have the position of a loader saved that the caller drives; see `DataPositions.follow`."""
        self._positions.follow(cursor, group_size)

    def positions_in(self, point: LoadedCheckpoint) -> list[Any]:
        """Return the loaders' positions that a checkpoint holds; raises InvalidCheckpoint where it is damaged."""
        return self._positions.read(point)

    def forget_positions(self) -> None:
        """Stop following all loaders."""
        self._positions.forget()

    def check_exact(self, batch: Any, compute: Callable[[Any], Any]) -> None:
        """Compute a micro-batch twice, and that of the first rank on all, and compare all bits; call it after `shares`.

        Args:
            batch: A micro-batch of this rank, such as `next(iter(loader))`.
            compute: Computes a micro-batch, forward and backward.

        Raises:
            CheckpointError: Something differs, or depends on what was computed before; the message names the module.
        """
        if self._exact is None:
            raise ValueError("check_exact() comes after shares()")
        SelfTest(self._exact, self._exact.module).run(batch, compute)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def begin(self, start_step: int, total_steps: int | None = None) -> None:
        """Start the training loop at this step.

        Args:
            start_step: The step that was restored; 0 for none.
            total_steps: Steps that training is to have at its end, for progress displays; None if not known.

        Raises:
            CheckpointError: Something in `states` is sharded.
        """
        node = self._node
        self._total_steps = total_steps
        CheckpointManager._newest_in_training = weakref.ref(self)
        node.heartbeat.set_start(start_step)
        node.reporter.training_started(start_step, total_steps, node.restorer.seconds)
        node.restorer.seconds = 0.0
        node.heartbeat.write(Phase.TRAINING, start_step)
        node.heartbeat.watch_compiler()
        self._speeds = compare_speeds(
            self._tracked.state.model,
            self._ranks,
            node_rank=self._options.settings.node_rank,
            report=node.reporter.slow_ranks,
        )
        self._tracked.check()
        self._say_what_is_removed(start_step)
        self._saving.begin(start_step)
        self.proving.begin(start_step)
        self.script.begin()
        # An attempt may have been killed between its last step and its end.
        self.end_rehearsal(start_step)

    def _say_what_is_removed(self, start_step: int) -> None:
        """Say, on rank 0, that older checkpoints go with the next commit, where nobody has chosen how many are kept."""
        if self._chose_retention or start_step == 0 or not self._ranks.is_first:
            return
        with contextlib.suppress(OSError):
            count = len(self._node.connection.tiers.durable.steps()) - DEFAULT_KEEP_LAST
            if count > 0:
                print(
                    f"checkpointing: the {DEFAULT_KEEP_LAST} newest checkpoints are kept by default, and {count} older "
                    "ones are removed after the next commit; CheckpointManager(keep_last=None) keeps all",
                    file=sys.stderr,
                    flush=True,
                )

    def step(self, step: int, samples_consumed: int | None = None, metrics: Mapping[str, float] | None = None) -> None:
        """End optimizer step number `step`: save when due, stop when all ranks have agreed to.

        Args:
            step: Number of the step, from 1.
            samples_consumed: See `save`; default: the number of the step.
            metrics: See `save`.

        Raises:
            Preempted: After an agreed stop, once the state is committed.
            CheckpointError: A share of the step was not computed; batches are drawn in another thread; or ranks may
                make different numbers of steps (torch's `Join`).
        """
        if self.world_size > 1:
            check_same_steps()
        if self._shares is not None:
            if step in skipped_steps():
                self._shares.skip()
            self._shares.check_done()
            self._shares = None
        self._positions.end_of_step(step)
        due = self.end_of_step(step)
        samples = step if samples_consumed is None else samples_consumed
        self._saving.last.ended(step, samples, metrics)
        self.record_step(step, metrics or {}, due)
        self._node.reporter.metrics_of_every_step(step, metrics)
        if due.stop or due.save:
            self.save(step, samples, metrics=metrics, wait=due.stop)
        elif due.snapshot:
            self.save(step, samples, metrics=metrics, commit=False)
        if due.stop:
            self.stop(step)
        self.end_rehearsal(step)

    def end_rehearsal(self, step: int) -> None:
        """End a rehearsal at its last step, once everything of that step is saved; do nothing in real training.

        Raises:
            RehearsalOver: It is over, and the state of the step is committed.
        """
        if ends_rehearsal(step):
            self.finished = True
            self.close()
            raise RehearsalOver

    def report(
        self, step: int, values: Mapping[str, Any], *, best_by: str | None = None, higher_is_better: bool | None = None
    ) -> None:
        """Report what was measured at a step to a supervisor, for status, report and metrics; rank 0's values count.

        Args:
            step: Number of the step.
            values: Values by name. `loss`, `learning_rate`, `grad_norm` and `tokens_per_s` are known, and names that
                begin with `eval_` belong to an evaluation. Values that are not finite numbers are left out.
            best_by: Name of the value of evaluations by which the best step is chosen (default: `eval_loss`).
            higher_is_better: Whether high values of it are better (default: no).
        """
        self._node.reporter.metrics(step, values, best_by, higher_is_better)

    def batch_drawn(self) -> None:
        """Note that this rank has drawn a batch by itself; what follows may wait for other ranks."""
        if self._speeds is not None:
            self._speeds.drawn()

    def end_of_step(self, step: int) -> Due:
        """Write a heartbeat, and agree with all ranks on what is due now."""
        failpoint("training.step")
        self._node.heartbeat.end_step(step)
        if step == self._total_steps:
            # Whatever a script does before it closes.
            self.pause()
        self._node.snapshots.end_of_step()
        self._tracked.buckets.end_of_step()
        if self._speeds is not None:
            self._speeds.end_of_step()
        return self._protocol.end_of_step(step)

    def record_step(self, step: int, figures: Mapping[str, Any], due: Due) -> None:
        """Record a step that has ended, and compare it where it was computed before; call it before the step is saved.

        Args:
            step: Number of the step.
            figures: Its `loss` and `grad_norm`, as far as they are known.
            due: What `end_of_step` has returned.

        Raises:
            RepetitionDiffers: With `resume.verify=strict`: the step differs from its first computation.
        """
        self.proving.end_step(step, figures)
        self.proving.conclude(step, agreed=due.differs)

    def _measure(self) -> Measured:
        snapshots = self._node.snapshots
        return Measured(
            snapshots.costs.snapshot_s, snapshots.is_preparing, self._node.connection.client.control.last_commit
        )

    def begin_step(self) -> None:
        """Tell the watchdog that a step begins. Only needed after `pause`; the end of the next step implies it."""
        if self._node.heartbeat.phase is Phase.IDLE:
            self._node.heartbeat.write(Phase.TRAINING, self._node.heartbeat.step)

    def pause(self) -> None:
        """Tell the watchdog that no step runs (an evaluation, a change of epoch), and that this rank is alive.

        A hang watchdog then waits longer, until the next step; call this again as a sign of life.
        """
        self._node.heartbeat.interrupt(Phase.IDLE)

    def outside_steps(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which no step runs; afterwards, one that had begun goes on."""
        return self._node.heartbeat.during(Phase.IDLE)

    def announce_batch(self, shape: BatchShape) -> None:
        """Report how a step is cut, so that a supervisor can cut finer where memory runs out."""
        self._node.reporter.batch_shape(shape)

    # -- saving --------------------------------------------------------------------------------------------------------

    def wants(self, step: int, *, commit: bool = True) -> bool:
        """Return whether `save` would do anything: there is no snapshot of this step, or none that is committed."""
        return self._saving.wants(step, commit=commit)

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
        self._saving.save(
            step,
            samples_consumed,
            self.retention,
            files or {},
            shared_files or {},
            metrics=metrics or {},
            wait=wait,
            commit=commit,
            generators=generators,
        )

    def wait_for_commit(self) -> None:
        """Block until the last snapshot that is to be committed is.

        Raises:
            CommitFailed: Storage refused it.
        """
        self._saving.wait_for_commit()

    @property
    def stall_s(self) -> float:
        """Seconds that this rank's training has waited for snapshots so far."""
        return self._node.snapshots.stall_s

    @property
    def awaited(self) -> int | None:
        """A step whose commit the caller waits for `Due` to report."""
        return self._protocol.awaited

    @awaited.setter
    def awaited(self, step: int | None) -> None:
        self._protocol.awaited = step

    # -- the end -------------------------------------------------------------------------------------------------------

    @property
    def stop_wanted(self) -> bool:
        """Whether this rank has been asked to stop; `end_of_step`, or `agree_to_stop`, agrees on it with all ranks."""
        return rank_signals.requested() or self._node.connection.client.control.stop_requested

    def agree_to_stop(self) -> bool:
        """Return, outside steps, whether any rank had been asked to stop at the previous call.

        Every rank must call this equally often. The next `end_of_step` does not repeat what is agreed here.
        """
        return self._protocol.agree_to_stop()

    def stop(self, step: int) -> None:
        """End this rank together with all others, once the snapshot of `step` is committed.

        Raises:
            Preempted: Always, after success.
            CommitFailed: Storage refused the snapshot.
        """
        self._stopped = True
        self.close()
        raise Preempted(step)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def leave_training(self) -> None:
        """Note that the training loop was left, by its end or by an exception: the program may end as it likes."""
        if CheckpointManager._newest_in_training() is self:
            CheckpointManager._newest_in_training = staticmethod(lambda: None)

    def close(self) -> None:
        """End training: wait for the last commit, and leave nothing in flight."""
        if self._closed:
            return
        self._closed = True
        self.leave_training()
        self._tracked.buckets.close()
        if not self._node.is_connected:
            rank_signals.end_reading(stopped=False)
            return
        try:
            self._finish(self._node.heartbeat.step)
        finally:
            self._node.connection.close_own_agent()

    def _finish(self, step: int) -> None:
        node, saving = self._node, self._saving
        node.heartbeat.write(Phase.SAVING, step)
        self._protocol.drain()
        if self._speeds is not None:
            self._speeds.close()
        if not self._stopped and saving.is_last_missing():
            self.save(saving.last.step, saving.last.samples_consumed, metrics=saving.last.metrics, wait=True)
        saving.wait_for_commit()
        self.proving.close()
        if step == node.heartbeat.start_step:
            self.restoring.await_commit_of_start(step)
        # No rank leaves before every rank's commit is known: the launcher would take an early exit for a failure.
        self._ranks.barrier()
        node.snapshots.close()
        node.heartbeat.write(Phase.DONE, step)
        rank_signals.end_reading(stopped=self._stopped)
        # Under a supervisor, the end of a loop is the end of its stage: another manager begins another one.
        loop_ended = saving.last.step > 0 and self._options.has_chosen_location
        node.connection.leave(step, finished=not self._stopped and (self.finished or loop_ended))
