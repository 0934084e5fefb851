"""The loops' state between two batches, on a trainer that has never run, and the values that it has logged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from checkpointing.lightning.loop_state import LightningLoopState, logged_values, restore_logged_values

# On a machine that has Slurm.
pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command")


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.error = torchmetrics.MeanAbsoluteError()
        self.seen: list[int] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = list(self.seen)
        checkpoint["state_dict"]["not kept"] = torch.zeros(1)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


class Counter(L.Callback):
    number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def trainer() -> Any:
    subject: Any = L.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, callbacks=[Counter()]
    )
    subject.strategy.connect(Module())
    subject.strategy._lightning_module._trainer = subject
    return subject


def state_after(completed: int, *, drawn: bool) -> tuple[Any, LightningLoopState]:
    subject = trainer()
    for part in ("total", "current"):
        progress = getattr(subject.fit_loop.epoch_loop.batch_progress, part)
        progress.ready = completed + drawn
        progress.started = progress.processed = progress.completed = completed
        epoch = getattr(subject.fit_loop.epoch_progress, part)
        epoch.ready = epoch.started = 1
    loop = LightningLoopState(subject, L.Callback())
    loop.step = completed
    return subject, loop


def test_the_batch_that_has_been_drawn_is_drawn_again() -> None:
    before, loop = state_after(7, drawn=True)
    before.fit_loop.epoch_loop.batch_progress.is_last_batch = True
    after = trainer()
    LightningLoopState(after, L.Callback()).load_state_dict(loop.state_dict())
    progress = after.fit_loop.epoch_loop.batch_progress
    for part in (progress.current, progress.total):
        assert (part.ready, part.started, part.processed, part.completed) == (7, 7, 7, 7)
    assert not progress.is_last_batch


def test_what_a_run_knows_is_restored() -> None:
    before, loop = state_after(3, drawn=True)
    module = before.lightning_module
    module.error.update(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
    module.seen = [4, 5]
    before.callbacks[0].number = 9
    before.accumulate_grad_batches, before.should_stop = 4, True
    before._logger_connector._callback_metrics["loss"] = torch.tensor(0.25)
    before._logger_connector._first_loop_iter, before._logger_connector._current_fx = False, "training_step"
    state = loop.state_dict()
    assert state["added"] == {"seen": [4, 5]}
    after = trainer()
    restored = LightningLoopState(after, L.Callback())
    restored.load_state_dict(state)
    assert restored.step == 3 and not restored.ended
    assert after.lightning_module.error.compute() == 1.5 and after.lightning_module.seen == [4, 5]
    assert after.callbacks[0].number == 9
    assert (after.accumulate_grad_batches, after.should_stop) == (4, True)
    assert after._logger_connector._callback_metrics == {"loss": torch.tensor(0.25)}
    # As a progress bar that reads the metrics before the first batch has it.
    after._logger_connector._callback_metrics["loss_epoch"] = torch.tensor(0.5)
    restored.continue_logging()
    assert after._logger_connector._callback_metrics == {"loss": torch.tensor(0.25)}
    assert after._logger_connector._first_loop_iter is False
    assert after._logger_connector._current_fx == "training_step"


@pytest.mark.parametrize("ended", [False, True])
def test_lightning_does_not_restart_in_its_own_way(ended: bool) -> None:
    _, loop = state_after(3, drawn=True)
    if ended:
        loop.ended = True
    after = trainer()
    restored = LightningLoopState(after, L.Callback())
    restored.load_state_dict(loop.state_dict())
    fit_loop = after.fit_loop
    if ended:
        # With more epochs than before, it goes on; its checkpoints are no ends.
        restored.go_on()
        assert not restored.ended
    else:
        # `FitLoop` finds out by this that the epoch has begun.
        assert fit_loop.epoch_loop._restarting
        fit_loop.epoch_loop.reset()
    assert not any(loop._restarting for loop in (fit_loop, fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop))
    assert "reset" not in vars(fit_loop.epoch_loop)


@pytest.mark.parametrize("scheduled", [True, False])
def test_accumulation_is_left_to_a_scheduler_until_the_first_batch(scheduled: bool) -> None:
    """Lightning's callback refuses to find it set when training begins."""
    saving, loading = trainer(), trainer()
    saving.accumulate_grad_batches = 4
    if scheduled:
        loading.callbacks.append(L.pytorch.callbacks.GradientAccumulationScheduler({0: 4}))
    state = LightningLoopState(loading, Counter())
    state.load_state_dict(LightningLoopState(saving, Counter()).state_dict())
    assert loading.accumulate_grad_batches == (1 if scheduled else 4)
    state.continue_logging()
    assert loading.accumulate_grad_batches == 4


def reduce(value: Any, *_: Any, **__: Any) -> Any:
    return value


def log(results: Any, name: str, value: Any, **options: Any) -> None:
    chosen = {"on_step": True, "on_epoch": True, "batch_size": 4, "sync_dist_fn": reduce, **options}
    results.log("training_step", name, value, **chosen)


def restored(state: Any, module: Any = None) -> Any:
    results = _ResultCollection(training=True)
    strategy = SimpleNamespace(reduce=reduce, root_device=torch.device("cpu"))
    fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(_results=results))
    restore_logged_values(SimpleNamespace(fit_loop=fit_loop, strategy=strategy, lightning_module=module), state)
    return results


@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min", max])
def test_an_epoch_goes_on_with_the_same_bits(reduction: Any) -> None:
    values = torch.rand(6, generator=torch.Generator().manual_seed(0))
    through = _ResultCollection(training=True)
    for value in values:
        log(through, "loss", value, reduce_fx=reduction)
    half = _ResultCollection(training=True)
    for value in values[:3]:
        log(half, "loss", value, reduce_fx=reduction)
    results = restored(logged_values(half))
    for value in values[3:]:
        log(results, "loss", value, reduce_fx=reduction)
    assert results.metrics(on_step=False)["callback"] == through.metrics(on_step=False)["callback"]


def test_a_metric_of_the_module_is_found_again() -> None:
    module = torch.nn.Module()
    module.error = torchmetrics.MeanAbsoluteError()
    results = _ResultCollection(training=True)
    module.error.update(torch.tensor([3.0]), torch.tensor([1.0]))
    log(results, "error", module.error, on_step=False, metric_attribute="error")
    again = restored(logged_values(results), module)
    assert again["training_step.error"].value is module.error
    assert again.metrics(on_step=False)["callback"] == {"error": torch.tensor(2.0)}


def test_what_was_reset_is_not_shown() -> None:
    results = _ResultCollection(training=True)
    log(results, "loss", torch.tensor(1.0))
    results.reset()
    assert restored(logged_values(results)).metrics(on_step=False)["callback"] == {}
