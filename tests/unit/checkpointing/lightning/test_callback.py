"""What each hook of Lightning's means, with a manager that a test plays, and what is restored in place of its own."""

from __future__ import annotations

import logging
import signal
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint

from checkpointing.errors import CheckpointError
from checkpointing.lightning import ResilientCheckpoint
from checkpointing.lightning.callback import (
    _check,
    _take_signals_back,
    put_restoring_back,
    replace_restoring,
    warn_of_draws,
)
from checkpointing.manager import rank_signals
from checkpointing.manager.step_protocol import Due


def callback(due: Due | None = None, **options: Any) -> Any:
    """A callback in the middle of training, before step 8."""
    subject: Any = ResilientCheckpoint("unused", **options)
    subject._manager = Mock(end_of_step=Mock(return_value=due or Due()))
    subject._loop, subject._loaders = Mock(step=7), Mock()
    subject._global_step = 70
    return subject


def trainer(**fields: Any) -> Any:
    defaults = {"global_step": 71, "log_every_n_steps": 50, "callback_metrics": {}, "sanity_checking": False}
    defaults |= {"world_size": 1, "callbacks": [], "_checkpoint_connector": SimpleNamespace()}
    return SimpleNamespace(**{**defaults, **fields})


def a_step(subject: Any, of: Any = None) -> None:
    subject.on_train_batch_end(of or trainer(), None, {"loss": torch.tensor(0.5)}, None, 0)


def next_batch(subject: Any) -> None:
    subject.on_train_batch_start(trainer(), None, None, 0)


@pytest.mark.parametrize(
    ("due", "saved"),
    [
        (Due(), []),
        (Due(save=True), [call(8, 8, metrics={}, wait=False)]),
        (Due(snapshot=True), [call(8, 8, commit=False)]),
        (Due(stop=True), [call(8, 8, metrics={}, wait=True)]),
    ],
)
def test_a_step_is_saved_before_the_next_batch(due: Due, saved: list[Any]) -> None:
    subject = callback(due)
    a_step(subject)
    subject._manager.end_of_step.assert_called_once_with(8)
    subject._manager.save.assert_not_called()
    next_batch(subject)
    assert subject._manager.save.mock_calls == saved
    assert subject._manager.stop.mock_calls == ([call(8)] if due.stop else [])
    next_batch(subject)
    assert subject._manager.save.mock_calls == saved


def test_a_batch_without_an_optimizer_step_is_none() -> None:
    subject = callback(Due(save=True))
    a_step(subject, trainer(global_step=70))
    subject._loaders.consume.assert_called_once()
    subject._manager.end_of_step.assert_not_called()


def test_the_generators_are_restored_once_the_first_batch_is_drawn() -> None:
    subject = callback()
    point = subject._pending = Mock()
    next_batch(subject)
    subject._manager.restoring.restore_rng.assert_called_once_with(point)
    subject._loop.continue_logging.assert_called_once()
    point.close.assert_called_once()
    next_batch(subject)
    subject._manager.restoring.restore_rng.assert_called_once()


def test_a_validation_is_followed_by_a_commit_with_its_value() -> None:
    subject = callback(best_metric="validation")
    a_step(subject)
    subject.on_validation_batch_start(trainer(), None, None, 0)
    subject._manager.pause.assert_called_once()
    subject.on_validation_end(trainer(callback_metrics={"validation": torch.tensor(0.25)}), None)
    next_batch(subject)
    subject._manager.save.assert_called_once_with(8, 8, metrics={"validation": 0.25}, wait=False)
    # The value is that of this step only.
    a_step(subject, trainer(global_step=72))
    next_batch(subject)
    subject._manager.save.assert_called_once()


def test_a_sanity_check_is_no_validation() -> None:
    subject = callback(best_metric="validation")
    a_step(subject)
    checking = trainer(callback_metrics={"validation": torch.tensor(0.25)}, sanity_checking=True)
    subject.on_validation_batch_start(checking, None, None, 0)
    subject.on_validation_end(checking, None)
    next_batch(subject)
    subject._manager.pause.assert_not_called()
    subject._manager.save.assert_not_called()


def test_the_loss_is_read_as_often_as_lightning_logs() -> None:
    subject = callback()
    a_step(subject)
    subject._manager.report.assert_not_called()
    a_step(subject, trainer(global_step=72, log_every_n_steps=3))
    subject._manager.report.assert_called_once_with(9, {"loss": 0.5})


def test_the_end_of_training_is_committed() -> None:
    subject = callback()
    manager = subject._manager
    subject.on_train_end(trainer(), None)
    assert subject._loop.ended is True
    manager.save.assert_called_once_with(7, 7, metrics={}, wait=True)
    manager.close.assert_called_once()
    assert manager.finished is True
    # Hooks that follow find nothing to do.
    subject.teardown(trainer(), None, "fit")
    next_batch(subject)
    manager.close.assert_called_once()


def test_the_callback_comes_first() -> None:
    others: list[Any] = [Mock(), ModelCheckpoint()]
    subject = ResilientCheckpoint("unused")
    assert subject.best_model_path == ""
    of = trainer(callbacks=[others[0], subject, others[1]])
    subject.setup(of, None, "fit")
    assert of.callbacks == [subject, *others]
    # The trainer asks its first checkpoint callback.
    others[1].best_model_path = "best.ckpt"
    assert subject.best_model_path == "best.ckpt"
    with pytest.raises(AttributeError):
        _ = subject.no_such_thing


def test_a_failure_leaves_the_trainer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_signals, "_num_readers", 1)
    subject = callback()
    manager, of = subject._manager, trainer(_checkpoint_connector=SimpleNamespace(resume_start=1))
    subject.on_exception(of, None, RuntimeError())
    subject._loaders.remove.assert_called_once()
    assert not vars(of._checkpoint_connector) and rank_signals._num_readers == 0
    # It is no end of training, and other ranks may go on.
    subject.teardown(of, None, "test")
    manager.close.assert_not_called()


def test_signals_are_handled_as_before_lightning_came() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    try:
        signal.signal(signal.SIGUSR1, lambda *_: None)
        of = trainer(_signal_connector=SimpleNamespace(received_sigterm=True))
        _take_signals_back(of, {signal.SIGUSR1: signal.SIG_IGN})
        assert not of._signal_connector.received_sigterm
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_trainer_that_cannot_be_resumed_exactly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    class FSDPStrategy:
        pass

    with pytest.raises(CheckpointError, match="FSDPStrategy: FSDP1"):
        _check(trainer(strategy=FSDPStrategy(), reload_dataloaders_every_n_epochs=0))
    with pytest.raises(CheckpointError, match="reload_dataloaders_every_n_epochs"):
        _check(trainer(strategy=Mock(), reload_dataloaders_every_n_epochs=1))
    _check(trainer(strategy=Mock(), reload_dataloaders_every_n_epochs=0))
    finder = trainer(strategy=Mock(), reload_dataloaders_every_n_epochs=0, callbacks=[LearningRateFinder()])
    with pytest.raises(CheckpointError, match="together with LearningRateFinder"):
        _check(finder)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CheckpointError, match=r"the Trainer knows of 1: pass Trainer\(devices=2"):
        _check(trainer(strategy=Mock(), reload_dataloaders_every_n_epochs=0))


def test_a_trial_run_keeps_nothing() -> None:
    subject = ResilientCheckpoint("unused")
    subject.on_fit_start(trainer(fast_dev_run=1), None)
    subject.on_train_start(trainer(), None)
    subject.on_train_end(trainer(), None)


class Connector:
    def __init__(self) -> None:
        self._loaded_checkpoint: dict[str, Any] = {"state_dict": 1}

    def resume_start(self, path: str) -> None:
        self._loaded_checkpoint = {"path": path}

    def restore_training_state(self) -> None:
        raise AssertionError


def test_nothing_of_another_checkpoint_is_restored() -> None:
    connector, restore = Connector(), Mock()
    trainer = SimpleNamespace(_checkpoint_connector=connector)
    replace_restoring(trainer, restore)
    connector.resume_start("initial.ckpt")
    assert connector._loaded_checkpoint == {}
    connector.restore_training_state()
    restore.assert_called_once()
    put_restoring_back(trainer)
    connector.resume_start("initial.ckpt")
    assert connector._loaded_checkpoint == {"path": "initial.ckpt"}


class Plain(L.LightningModule):
    pass


class Augmenting(L.LightningModule):
    def on_after_batch_transfer(self, batch: torch.Tensor, dataloader_idx: int) -> torch.Tensor:
        return batch + torch.randn(())


def test_draws_that_are_not_resumed_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "checkpointing"):
        warn_of_draws(Plain())
        assert not caplog.messages
        warn_of_draws(Augmenting())
    (message,) = caplog.messages
    assert "Augmenting draws at random in on_after_batch_transfer" in message
