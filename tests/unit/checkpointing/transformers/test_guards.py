"""Steps that are refused before anything of them is kept, and the loss of those that are skipped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointing.errors import LossSpike, NonFinite
from checkpointing.transformers import guards
from checkpointing.transformers.guards import SkippedLoss, StepGuard

INF = float("inf")


class OnDevice:
    """A figure that the device has not computed yet."""

    is_at_hand = False

    def __init__(self, value: Any) -> None:
        self._value = float(value)

    def __float__(self) -> float:
        return self._value


def judge(
    guard: StepGuard,
    step: int,
    norm: float | None = None,
    *,
    is_kept: bool = False,
    has_scaler: bool = False,
    was_applied: bool = True,
) -> None:
    guard.judge(
        step,
        torch.tensor(norm) if norm is not None else None,
        is_kept=is_kept,
        has_scaler=has_scaler,
        was_applied=was_applied,
    )


def test_gradients_on_the_host_are_judged_at_once() -> None:
    guard = StepGuard()
    judge(guard, 1, 2.0)
    with pytest.raises(NonFinite) as caught:
        judge(guard, 2, float("nan"))
    assert caught.value.step == 2


def test_a_step_on_a_device_is_judged_after_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "Later", OnDevice)
    guard = StepGuard()
    judge(guard, 1, INF)
    with pytest.raises(NonFinite) as caught:
        judge(guard, 2, 1.0)
    assert caught.value.step == 1


def test_a_step_that_is_kept_is_judged_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "Later", OnDevice)
    guard = StepGuard()
    judge(guard, 1, 1.0)
    with pytest.raises(NonFinite) as caught:
        judge(guard, 2, INF, is_kept=True)
    assert caught.value.step == 2


def test_the_end_of_an_epoch_asks_for_the_same_step_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "Later", OnDevice)
    guard = StepGuard(spike_zscore=8.0)
    guard.restore_losses([1.0] * 16)
    guard.add_loss(torch.tensor(100.0))
    judge(guard, 1, 1.0)
    # The loss was passed the first time only.
    with pytest.raises(LossSpike):
        judge(guard, 1, 1.0, is_kept=True)


def test_an_overflow_under_a_scaler_is_the_scalers() -> None:
    """A fused optimizer is called all the same, and skips the step itself: accelerate does not hear of it."""
    judge(StepGuard(), 5, INF, has_scaler=True)
    judge(StepGuard(), 5, INF, has_scaler=True, was_applied=False)
    judge(StepGuard(), 5, 1.0)
    with pytest.raises(NonFinite):
        judge(StepGuard(), 5, INF)


def test_a_step_that_the_optimizer_has_skipped_is_not_judged() -> None:
    judge(StepGuard(), 5, INF, was_applied=False, is_kept=True)


def test_nothing_is_checked_on_request() -> None:
    guard = StepGuard(check_finite=False)
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), INF)
    guard.measure_norm([parameter])
    guard.add_loss(torch.tensor(INF))
    judge(guard, 1, INF, is_kept=True)
    judge(guard, 2, is_kept=True)
    assert guard.recent_losses is None


def test_gradients_that_nobody_clips_are_measured() -> None:
    guard = StepGuard()
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))]
    parameters[0].grad = torch.tensor([1.0, float("nan")])
    guard.measure_norm(parameters)
    with pytest.raises(NonFinite):
        judge(guard, 1)


def test_a_spike_is_found_in_the_sum_of_a_steps_micro_batches() -> None:
    guard = StepGuard(spike_zscore=8.0)
    for step in range(1, 21):
        guard.add_loss(torch.tensor(0.5))
        guard.add_loss(torch.tensor(0.5 + step % 3 / 100))
        judge(guard, step, 1.0)
    guard.add_loss(torch.tensor(0.5))
    guard.add_loss(torch.tensor(9.5))
    with pytest.raises(LossSpike, match="deviations above the median"):
        judge(guard, 21, 1.0)


def test_recent_losses_survive_a_restart() -> None:
    guard, resumed = StepGuard(spike_zscore=8.0), StepGuard(spike_zscore=8.0)
    for step in range(1, 18):
        guard.add_loss(torch.tensor(float(step)))
        judge(guard, step, 1.0)
    resumed.restore_losses([99.0])
    resumed.restore_losses(guard.recent_losses or ())
    assert resumed.recent_losses == guard.recent_losses == [float(step) for step in range(1, 18)]
    StepGuard().restore_losses([1.0])


def trainer(step: int, total: torch.Tensor, last_logged: int, history: list[dict[str, float]]) -> Any:
    state = SimpleNamespace(global_step=step, log_history=history)
    return SimpleNamespace(state=state, _tr_loss=total, _globalstep_last_logged=last_logged)


def test_a_skipped_step_leaves_the_logged_mean_as_it_is() -> None:
    total = torch.tensor(6.0)
    skipped = SkippedLoss()
    loss = skipped.of_step(trainer(4, total, 1, []))
    assert loss == 2.0
    total += loss / 2
    # The step's second micro-batch.
    assert skipped.of_step(trainer(4, total, 1, [])) == 2.0
    total += loss / 2
    assert total / 4 == 2.0
    assert skipped.of_step(trainer(5, total, 1, [])) == 2.0


@pytest.mark.parametrize(
    ("history", "expected"), [([], 0.0), ([{"loss": 3.0}, {"loss": 2.5}, {"eval_loss": 9.0}], 2.5)]
)
def test_right_after_a_log_entry_its_loss_stands_in(history: list[dict[str, float]], expected: float) -> None:
    assert SkippedLoss().of_step(trainer(4, torch.tensor(0.0), 4, history)) == expected
