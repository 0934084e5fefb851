"""Steps of which nothing may be kept: gradients that are NaN or infinite, loss spikes, and steps to be skipped."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.errors import LossSpike, NonFinite
from checkpointing.files import sharding
from checkpointing.manager.spikes import SpikeDetector
from checkpointing.process.device import Later


@dataclass(frozen=True)
class _Figures:
    """What is known of a step: None where it is not judged by that figure."""

    step: int
    norm: Later | None
    loss: Later | None

    @property
    def is_at_hand(self) -> bool:
        return all(figure is None or figure.is_at_hand for figure in (self.norm, self.loss))


class StepGuard:
    """Judges each step's gradients and loss before anything of the step is kept.

    On an accelerator, reading a figure of the step that has just ended would make the host wait for the device. So a
    step is judged one step later, unless its figures are at hand or it is about to be kept. Gradients are checked where
    `check_finite` is set, and losses, averaged over `world_size` ranks, where there is a `spike_zscore`.
    """

    def __init__(self, *, check_finite: bool = True, spike_zscore: float | None = None, world_size: int = 1) -> None:
        self.check_finite = check_finite
        self.spikes = SpikeDetector(spike_zscore) if spike_zscore is not None else None
        self._world_size = world_size
        self._own_norm: torch.Tensor | None = None
        # Sum over the micro-batches of the step that runs, of this rank.
        self._step_loss: torch.Tensor | None = None
        self._pending: _Figures | None = None

    def expect_means(self) -> None:
        """Take each rank's losses for the mean of all already: that of several equal numbers may be another one."""
        self._world_size = 1

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch to that of the step."""
        if self.spikes is not None:
            self._step_loss = loss if self._step_loss is None else self._step_loss + loss

    def measure_norm(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Compute the norm of the gradients, where the Trainer does not clip and so does not compute it."""
        if self.check_finite:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            self._own_norm = torch.nn.utils.get_total_norm(gradients)

    def judge(
        self, step: int, norm: torch.Tensor | float | None, *, is_kept: bool, has_scaler: bool, was_applied: bool
    ) -> None:
        """Judge the previous step, and this one if its figures are at hand or it is kept.

        Gradients are averaged over all ranks, and so is the loss here: all ranks come to the same result, NonFinite or
        LossSpike.

        Args:
            step: Number of the step that has just ended; may be passed twice, as at the end of an epoch.
            norm: Of its gradients; None takes the one of `measure_norm`.
            is_kept: A save or an evaluation of this step follows.
            has_scaler: A gradient scaler is in use. It skips steps without finite gradients and continues with a
                smaller scale; a fused optimizer skips them itself, which accelerate does not report.
            was_applied: The optimizer has not skipped the step.
        """
        norm = whole(norm if norm is not None else self._own_norm)
        previous, loss = self._pending, self._take_loss()
        if loss is None and previous is not None and previous.step == step:
            loss = previous.loss
        if was_applied:
            looks_at_norm = self.check_finite and not has_scaler
            self._pending = _Figures(step, Later(norm) if looks_at_norm and norm is not None else None, loss)
        if previous is not None and previous.step != step:
            self._check(previous)
        current = self._pending
        if current is not None and (is_kept or current.is_at_hand):
            self._check(current)
            self._pending = None

    def _take_loss(self) -> Later | None:
        loss, self._step_loss = self._step_loss, None
        if loss is None:
            return None
        if self._world_size > 1:
            loss = loss.clone()
            dist.all_reduce(loss)
            loss /= self._world_size
        return Later(loss)

    def _check(self, figures: _Figures) -> None:
        if figures.norm is not None and not math.isfinite(float(figures.norm)):
            raise NonFinite(figures.step)
        if figures.loss is not None and self.spikes is not None:
            reason = self.spikes.look(float(figures.loss))
            if reason is not None:
                raise LossSpike(figures.step, reason)

    @property
    def recent_losses(self) -> list[float] | None:
        """Losses by which the next one is judged; None if the loss is not checked."""
        return list(self.spikes.losses) if self.spikes is not None else None

    def restore_losses(self, losses: Iterable[float]) -> None:
        """Continue with the `recent_losses` of a checkpoint."""
        if self.spikes is not None:
            self.spikes.losses.clear()
            self.spikes.losses.extend(losses)


def whole(value: Any) -> Any:
    """Return a figure that may be a sharded tensor as a whole one; all ranks must call this together."""
    return value.full_tensor() if sharding.is_dtensor(value) else value


class SkippedLoss:
    """The loss that stands in for a skipped step, so that the logged mean stays what it is."""

    def __init__(self) -> None:
        self._known: tuple[int, torch.Tensor] | None = None

    def of_step(self, trainer: Any) -> torch.Tensor:
        """Return the mean since the last log entry, or right after one its loss; the same for all micro-batches."""
        step, total = trainer.state.global_step, trainer._tr_loss
        if self._known is None or self._known[0] != step:
            num_steps = step - trainer._globalstep_last_logged
            logged = (entry["loss"] for entry in reversed(trainer.state.log_history) if "loss" in entry)
            self._known = (step, total / num_steps if num_steps else torch.full_like(total, next(logged, 0.0)))
        return self._known[1]
