"""What happens at each event of the Trainer's loop, and what is passed on to the other callbacks."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from checkpointing.manager.step_protocol import Due
from checkpointing.transformers.callback import (
    CommitNotices,
    EvaluationCutShort,
    InterruptibleEvaluation,
    StepCallback,
    Throughput,
    outside_steps,
    remove_jit_checkpoints,
    watch_callbacks,
)
from checkpointing.transformers.train_call import ResilientOptions


def trainer(due: Due | None = None, *, options: ResilientOptions | None = None, is_in_train: bool = True) -> Any:
    return SimpleNamespace(
        model=Mock(),
        is_in_train=is_in_train,
        _options=options or ResilientOptions(),
        _manager=Mock(end_of_step=lambda step: due),
        _notices=Mock(),
        _session=SimpleNamespace(
            due=Due(),
            stopping=False,
            epoch_is_over=True,
            guard=Mock(),
            evaluation=Mock(),
            throughput=Mock(),
            data=Mock(),
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
    assert not subject._session.epoch_is_over
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
    subject._session.epoch_is_over = False
    StepCallback(subject).on_epoch_end(Mock(), Mock(), Mock())
    assert subject._session.epoch_is_over
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
        args = Mock(metric_for_best_model=None, greater_is_better=None)
        callback.on_log(args, TrainerState(global_step=5), Mock(), logs={"loss": 1.0})
        assert subject._session.evaluation.step.called == is_in_train
        assert subject._manager.report.called == is_in_train
        if is_in_train:
            values = {"tokens_per_s": 5.0, "loss": 1.0}
            subject._manager.report.assert_called_once_with(5, values, best_by=None, higher_is_better=None)


@pytest.mark.parametrize(("metric", "name"), [("f1", "eval_f1"), ("eval_f1", "eval_f1")])
def test_the_metric_of_the_best_model_is_reported(metric: str, name: str) -> None:
    subject = trainer()
    subject._session.throughput.between_entries.return_value = {}
    args = Mock(metric_for_best_model=metric, greater_is_better=True)
    StepCallback(subject).on_log(args, TrainerState(global_step=5), Mock(), logs={"eval_f1": 0.5})
    subject._manager.report.assert_called_once_with(5, {"eval_f1": 0.5}, best_by=name, higher_is_better=True)


def test_training_and_steps_begin_and_end() -> None:
    subject = trainer()
    callback = StepCallback(subject)
    callback.on_train_begin(Mock(), Mock(), Mock())
    callback.on_step_begin(Mock(), Mock(), Mock())
    callback.on_train_end(Mock(), Mock(), Mock())
    subject._on_train_begin.assert_called_once()
    subject._manager.begin_step.assert_called_once()
    subject._on_train_end.assert_called_once()


def test_transformers_own_saves_on_a_signal_are_removed() -> None:
    def own(number: int, frame: Any) -> None:
        pass

    subject = trainer()
    subject.args, subject.state, subject.control = SimpleNamespace(enable_jit_checkpoint=True), Mock(), Mock()
    handler = CallbackHandler([JITCheckpointCallback()], None, None, None, None)
    subject.pop_callback = handler.pop_callback
    before = signal.signal(signal.SIGTERM, own)
    try:
        handler.callbacks[0].set_trainer(subject)
        remove_jit_checkpoints(subject)
        assert signal.getsignal(signal.SIGTERM) is own and handler.callbacks == []
        # Where it was not asked for, there is nothing to remove.
        remove_jit_checkpoints(subject)
    finally:
        signal.signal(signal.SIGTERM, before)


# -- tokens per second -------------------------------------------------------------------------------------------------


def test_tokens_are_counted_where_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("checkpointing.transformers.callback.time.monotonic", lambda: now[0])
    throughput = Throughput(num_ranks=2)
    assert throughput.between_entries({"loss": 1.0}) == {}
    throughput.count({"input_ids": torch.zeros(5, 100)})
    throughput.count({"pixel_values": torch.zeros(5, 100)})
    throughput.count([torch.zeros(5, 100)])
    assert throughput.between_entries({"loss": 1.0}) == {}
    now[0] = 12.0
    throughput.count({"input_ids": torch.zeros(15, 100)})
    assert throughput.between_entries({"eval_loss": 1.0}) == {}
    assert throughput.between_entries({"loss": 1.0}) == {"tokens_per_s": 1500.0}
    # TRL's own count, without padding, takes precedence.
    now[0] = 13.0
    assert throughput.between_entries({"loss": 1.0, "num_tokens": 4100.0}) == {"tokens_per_s": 100.0}
    now[0] = 14.0
    assert throughput.between_entries({"loss": 1.0, "num_tokens": 50.0}) == {}


# -- evaluations that are cut short ------------------------------------------------------------------------------------


class AskedToStop:
    def __init__(self, stops: bool) -> None:
        self.stops, self.num_pauses, self.num_questions = stops, 0, 0

    def pause(self) -> None:
        self.num_pauses += 1

    def agree_to_stop(self) -> bool:
        self.num_questions += 1
        return self.stops


def test_an_evaluation_is_cut_short_once_all_ranks_agree() -> None:
    manager: Any = AskedToStop(stops=False)
    evaluation = InterruptibleEvaluation(manager, 1)
    random.seed(1)
    before = random.getstate()
    evaluation.begin(can_be_repeated=True)
    random.random()
    evaluation.step()
    manager.stops = True
    with pytest.raises(EvaluationCutShort):
        evaluation.step()
    assert evaluation.before is not None and evaluation.before["python"] == before
    assert (manager.num_pauses, manager.num_questions) == (3, 2)
    evaluation.end()
    evaluation.step()
    assert evaluation.before is None and manager.num_questions == 2


def test_an_evaluation_that_could_not_be_repeated_runs_to_its_end() -> None:
    manager: Any = AskedToStop(stops=True)
    evaluation = InterruptibleEvaluation(manager, 1)
    evaluation.begin(can_be_repeated=False)
    evaluation.step()
    assert (manager.num_pauses, manager.num_questions) == (2, 0)


def test_generators_are_kept_for_the_first_batch_after_a_repeated_evaluation() -> None:
    manager: Any = AskedToStop(stops=False)
    evaluation = InterruptibleEvaluation(manager, 1)
    evaluation.was_repeated()
    assert evaluation.after is not None and evaluation.after["python"] == random.getstate()


# -- `on_save` once a checkpoint is committed --------------------------------------------------------------------------


class SavingHandler:
    def __init__(self) -> None:
        self.saved: list[tuple[int, int]] = []
        self.staged: list[int] = []
        self.callbacks: list[Any] = [self, object()]

    def on_checkpoint_staged(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self.staged.append(state.global_step)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl) -> TrainerControl:
        self.saved.append((state.global_step, len(state.log_history)))
        control.should_save = False
        return control


def set_up(committed: set[int] | None = None) -> tuple[Any, SavingHandler, CommitNotices, TrainerState]:
    handler = SavingHandler()
    manager = SimpleNamespace(
        awaited=None, world_size=1, restoring=SimpleNamespace(is_committed=lambda step: step in (committed or set()))
    )
    trainer = SimpleNamespace(callback_handler=handler, control=TrainerControl(), args=None, _manager=manager)
    notices = CommitNotices(trainer)
    notices._pushes = Mock()
    return trainer, handler, notices, TrainerState(global_step=10)


def save(trainer: Any, state: TrainerState, step: int) -> None:
    state.global_step = step
    state.log_history.append({"step": step})
    trainer.control.should_save = True
    trainer.control = trainer.callback_handler.on_save(None, state, trainer.control)
    assert not trainer.control.should_save


def test_callbacks_hear_of_a_save_at_its_commit_with_the_state_of_its_step() -> None:
    trainer, handler, notices, state = set_up()
    save(trainer, state, 10)
    save(trainer, state, 20)
    assert (handler.staged, handler.saved, trainer._manager.awaited) == ([10, 20], [], 10)
    # A request of the step that runs now is not taken back.
    trainer.control.should_save = True
    notices.notify(committed=True)
    assert (handler.saved, trainer._manager.awaited) == ([(10, 1)], 20)
    assert trainer.control.should_save


def test_a_save_that_was_not_committed_is_not_reported() -> None:
    trainer, handler, notices, state = set_up()
    save(trainer, state, 10)
    notices.notify(committed=False)
    notices.notify(committed=True)
    assert handler.saved == [] and trainer._manager.awaited is None


def test_at_the_end_storage_is_asked() -> None:
    trainer, handler, notices, state = set_up(committed={20})
    save(trainer, state, 10)
    save(trainer, state, 20)
    notices.notify_all()
    assert handler.saved == [(20, 2)]
    pushes: Any = notices._pushes
    assert [call.args[0].global_step for call in pushes.push.call_args_list] == [20]


def test_another_training_begins_with_none() -> None:
    trainer, handler, notices, state = set_up(committed={10})
    save(trainer, state, 10)
    notices.forget()
    notices.notify_all()
    assert handler.saved == []


def test_what_a_callback_draws_does_not_change_what_training_draws() -> None:
    """The step at which a commit is known depends on the storage: two runs that nobody disturbed ended differently."""
    trainer, _, notices, state = set_up()
    saved: list[int] = []

    def sample(args: Any, state: TrainerState, control: TrainerControl) -> TrainerControl:
        torch.rand(5)
        saved.append(state.global_step)
        return control

    notices._notify_now = sample
    save(trainer, state, 10)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    notices.notify(committed=True)
    assert torch.equal(torch.rand(2), expected) and saved == [10]


# -- what runs between steps is no step --------------------------------------------------------------------------------


class PhaseManager:
    """Remembers whether a step runs."""

    def __init__(self) -> None:
        self.phase = "step"

    def pause(self) -> None:
        self.phase = "pause"

    @contextlib.contextmanager
    def outside_steps(self) -> Iterator[None]:
        before, self.phase = self.phase, "outside"
        yield
        self.phase = before


class EventHandler:
    """The callback handler of a trainer, with a callback that looks at the phase."""

    def __init__(self, manager: PhaseManager) -> None:
        self.seen: list[Any] = []
        self._manager = manager

    def call_event(self, event: str, *args: Any, **kwargs: Any) -> str:
        self.seen.append((event, self._manager.phase, args, kwargs))
        return event


def phase_trainer(*, is_in_train: bool = True) -> Any:
    manager = PhaseManager()
    return SimpleNamespace(callback_handler=EventHandler(manager), _manager=manager, is_in_train=is_in_train)


@pytest.mark.parametrize(
    ("event", "during", "after"),
    [
        ("on_log", "outside", "step"),
        ("on_save", "outside", "step"),
        ("on_evaluate", "outside", "step"),
        ("on_epoch_end", "pause", "pause"),
        ("on_step_end", "step", "step"),
        ("on_optimizer_step", "step", "step"),
    ],
)
def test_what_callbacks_do_between_steps_is_no_step(event: str, during: str, after: str) -> None:
    own = phase_trainer()
    watch_callbacks(own)
    assert own.callback_handler.call_event(event, "args", logs=1) == event
    assert own.callback_handler.seen == [(event, during, ("args",), {"logs": 1})] and own._manager.phase == after


def test_before_and_after_training_nothing_is_noted() -> None:
    own = phase_trainer(is_in_train=False)
    watch_callbacks(own)
    for event in ("on_log", "on_epoch_end"):
        own.callback_handler.call_event(event)
    with outside_steps(own):
        assert own._manager.phase == "step"
    assert [phase for _, phase, *_ in own.callback_handler.seen] == ["step", "step"]
