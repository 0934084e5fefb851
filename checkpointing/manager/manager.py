"""`CheckpointManager`: what a rank uses to save, to resume, and to stop together with the other ranks.

manager = CheckpointManager("checkpoints", model=model, optimizer=optimizer, save_steps=100)
steps = range(manager.resume(), total_steps)
for step, batch in zip(steps, manager.batches(loader)):
    ...                                   # forward, backward, optimizer.step()
    manager.step(step + 1)
manager.close()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Unpack

import torch

from checkpointing.agent.events import BatchShape
from checkpointing.commit.retention import RetentionOptions, retention_of
from checkpointing.commit.tiers import DEFAULT_LOCAL_KEEP_LAST
from checkpointing.data.dealing import check_virtual_ranks
from checkpointing.exact.gradients import ExactGradients
from checkpointing.exact.self_test import SelfTest
from checkpointing.exact.shares import Share, Shares
from checkpointing.host.environment import rank_settings
from checkpointing.manager import stop_signal
from checkpointing.manager.checkpointed import CheckpointedTraining
from checkpointing.manager.options import Options
from checkpointing.manager.spikes import SkippedSteps
from checkpointing.process.ranks import Ranks
from checkpointing.snapshot.cadence import DEFAULT_OVERHEAD_CAP, Auto, Cadence


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


class CheckpointManager(CheckpointedTraining):
    """Saves, resumes and stops a training loop. One per rank.

    Every rank calls all methods at the same step, from the thread that trains.
    """

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
            scheduler: Its learning rate scheduler.
            scaler: Its gradient scaler.
            states: Further objects with `state_dict` and `load_state_dict` (a moving average of the weights, say), by
                name; each is kept in `<name>.pt`. They may change at any moment: training waits while they are copied.
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
            check_replicas: Compare the ranks' parameters and optimizer state before each snapshot.
            buddy_copies: Where no node holds all of the state, have each node keep a copy of another one's part in
                memory, so that losing a node loses no snapshot. Takes as much memory and network again.
            allow_non_finite: Keep a state whose parameters or optimizer state hold NaN or infinity; otherwise
                `NonFinite` is raised, nothing of that step is kept, and a supervisor resumes from the step before.
                Frozen parameters and buffers may always hold them.
            virtual_ranks: Number of virtual ranks that compute each step, with the same bits on any number of ranks up
                to that; see `shares`. "auto" is that of the checkpoint, or else of the ranks.
            **retention: Which checkpoints to keep (see `Retention`): `keep_last`, the number of newest ones, all by
                default; in addition every one whose step is a multiple of `keep_every`, and the best by `best_metric`,
                one of the metrics given to `save`, where `greater_is_better` says how it compares.

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
            retention=retention_of(retention, CheckpointManager),
            overlap=overlap,
            check_replicas=check_replicas,
            buddy_copies=buddy_copies,
            allow_non_finite=allow_non_finite,
        )
        super().__init__(options, Ranks.of_this_process())
        self.track(
            model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, states=states, pipeline=pipeline
        )
        self._virtual_ranks, self._wrapped = virtual_ranks, model
        self._exact: ExactGradients | None = None
        # What the shares of the step are from.
        self._shares: Shares | None = None
        stop_signal.begin_reading()

    def resume(self, total_steps: int | None = None) -> int:
        """Restore everything tracked and the generators; return the step to continue from, 0 for a fresh start.

        Args:
            total_steps: Steps that training is to have at its end, for progress displays; None if not known.

        Raises:
            CheckpointError: The run counts on virtual ranks (`elastic.mode=exact`), and the manager has none.
        """
        # Refused before anything is restored.
        rank_settings().virtual_ranks_of(self._virtual_ranks)
        point = self.choose() or self.starting_point()
        if point is not None:
            self.restore_model(point)
            self.restore_optimizer(point)
            self.restore_rng(point)
            self._positions.restore(point)
            point.close()
        step = point.step if point is not None else 0
        self.begin(step, total_steps)
        return step

    def batches(self, loader: Any) -> Iterator[Any]:
        """Iterate over a loader without end, epoch after epoch, from where the checkpoint was made.

        For a loop such as `for step, batch in zip(range(manager.resume(), total), manager.batches(loader))`; every
        batch that was handed out counts as used by the next `step`. The loader's own order is kept, also across
        epochs; where its sampler, batch sampler or data set has `set_epoch`, it is called. What is drawn at random
        while a batch is made depends on the batch's number, so that workers need not be in step with training. Call
        this after `resume`, in the same order for several loaders.

        Args:
            loader: A torch `DataLoader`, or torchdata's `StatefulDataLoader`, whose state is kept where its data set
                has no length.

        Raises:
            ValueError: The manager has virtual ranks, which take `shares`.
            CheckpointError: It is another kind of loader; or, while iterating, the resumed order differs.
        """
        if self._virtual_ranks is not None:
            raise ValueError(
                "batches() knows no virtual ranks: iterate over shares(loader), or leave virtual_ranks out"
            )
        return self._positions.batches(loader)

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

        return Shares(steps, self._exact, lambda: self._heartbeat.step, drawn)

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

    def step(self, step: int, samples_consumed: int | None = None, metrics: Mapping[str, float] | None = None) -> None:
        """End optimizer step number `step`: save when due, stop when all ranks have agreed to.

        Args:
            step: Number of the step, from 1.
            samples_consumed: See `save`; default: the number of the step.
            metrics: See `save`.

        Raises:
            Preempted: After an agreed stop, once the state is committed.
            CheckpointError: A share of the step was not computed.
        """
        if self._shares is not None:
            if step in skipped_steps():
                self._shares.skip()
            self._shares.check_done()
            self._shares = None
        due = self.end_of_step(step)
        samples = step if samples_consumed is None else samples_consumed
        self._last_step.ended(step, samples, metrics)
        self._reporter.metrics_of_every_step(step, metrics)
        if due.stop or due.save:
            self.save(step, samples, metrics=metrics, wait=due.stop)
        elif due.snapshot:
            self.save(step, samples, metrics=metrics, commit=False)
        if due.stop:
            self.stop(step)

    def report(self, step: int, values: Mapping[str, Any]) -> None:
        """Report what was measured at a step to a supervisor, for status, report and metrics; rank 0's values count.

        Args:
            step: Number of the step.
            values: Values by name. `loss`, `learning_rate`, `grad_norm` and `tokens_per_s` are known, and names that
                begin with `eval_` belong to an evaluation. Values that are not finite numbers are left out.
        """
        self._reporter.metrics(step, values)
