"""What the callback does at each event of the Trainer's loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import TrainerControl, TrainerState

from checkpointing.manager.step_protocol import Due
from checkpointing.transformers.callback import StepCallback
from checkpointing.transformers.train_call import ResilientOptions


def trainer(due: Due | None = None, *, options: ResilientOptions | None = None, is_in_train: bool = True) -> Any:
    return SimpleNamespace(
        model=Mock(),
        is_in_train=is_in_train,
        _options=options or ResilientOptions(),
        _manager=Mock(end_of_step=lambda step: due),
        _notices=Mock(),
        _session=SimpleNamespace(
            due=Due(), stopping=False, guard=Mock(), evaluation=Mock(), throughput=Mock(), data=Mock()
        ),
        _on_train_begin=Mock(),
        _on_train_end=Mock(),
    )


def end_step(subject: Any, step: int = 5) -> TrainerControl:
    control = TrainerControl()
    StepCallback(subject).on_step_end(Mock(), TrainerState(global_step=step, max_steps=10), control)
    return control


@pytest.mark.parametrize(
    ("due", "saves", "stops"),
    [
        (Due(), False, False),
        (Due(snapshot=True), False, False),
        (Due(save=True), True, False),
        (Due(stop=True), True, True),
    ],
)
def test_what_all_ranks_have_agreed_on_is_done(due: Due, saves: bool, stops: bool) -> None:
    subject = trainer(due)
    control = end_step(subject)
    assert (control.should_save, control.should_training_stop) == (saves, stops)
    assert (subject._session.due, subject._session.stopping) == (due, stops)
    subject._notices.notify.assert_not_called()


def test_the_last_step_is_saved_where_the_trainer_does_not_save() -> None:
    by_price = ResilientOptions(saves_by_price=True)
    assert end_step(trainer(Due(), options=by_price), step=10).should_save
    assert not end_step(trainer(Due(), options=by_price), step=9).should_save
    assert not end_step(trainer(Due()), step=10).should_save


@pytest.mark.parametrize("committed", [True, False])
def test_a_settled_commit_is_passed_on(committed: bool) -> None:
    subject = trainer(Due(committed=committed, not_committed=not committed))
    end_step(subject)
    subject._notices.notify.assert_called_once_with(committed=committed)


def test_gradients_are_measured_where_the_trainer_does_not_clip() -> None:
    for max_grad_norm, num_calls in ((1.0, 0), (0.0, 1)):
        subject = trainer()
        StepCallback(subject).on_pre_optimizer_step(
            SimpleNamespace(max_grad_norm=max_grad_norm),
            Mock(),
            Mock(),
        )
        assert subject._session.guard.measure_norm.call_count == num_calls


def test_the_end_of_an_epoch_is_recorded_and_no_step() -> None:
    subject = trainer()
    StepCallback(subject).on_epoch_end(Mock(), Mock(), Mock())
    subject._session.data.cursor.end_epoch.assert_called_once()
    subject._manager.pause.assert_called_once()
    subject._session.data.cursor = None
    StepCallback(subject).on_epoch_end(Mock(), Mock(), Mock())


def test_an_evaluation_outside_training_is_left_alone() -> None:
    for is_in_train in (True, False):
        subject = trainer(is_in_train=is_in_train)
        callback = StepCallback(subject)
        subject._session.throughput.between_entries.return_value = {"tokens_per_s": 5.0}
        callback.on_prediction_step(Mock(), Mock(), Mock())
        callback.on_log(Mock(), TrainerState(global_step=5), Mock(), logs={"loss": 1.0})
        assert subject._session.evaluation.step.called == is_in_train
        assert subject._manager.report.called == is_in_train
        if is_in_train:
            subject._manager.report.assert_called_once_with(5, {"tokens_per_s": 5.0, "loss": 1.0})


def test_training_and_steps_begin_and_end() -> None:
    subject = trainer()
    callback = StepCallback(subject)
    callback.on_train_begin(Mock(), Mock(), Mock())
    callback.on_step_begin(Mock(), Mock(), Mock())
    callback.on_train_end(Mock(), Mock(), Mock())
    subject._on_train_begin.assert_called_once()
    subject._manager.begin_step.assert_called_once()
    subject._on_train_end.assert_called_once()
