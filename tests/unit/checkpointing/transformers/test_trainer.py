"""The overrides of a trainer's loop, over a loop that only records what it is asked for."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock, Mock

import pytest
import torch
from helpers.small_checkpoint import point
from transformers import TrainerControl

from checkpointing.data.dealing import StepLayout
from checkpointing.errors import CheckpointError, CommitFailed, NonFinite
from checkpointing.manager.step_protocol import Due
from checkpointing.transformers import trainer as trainer_module
from checkpointing.transformers.callback import EvaluationCutShort, InterruptibleEvaluation, Throughput
from checkpointing.transformers.further_states import export_states
from checkpointing.transformers.guards import StepGuard
from checkpointing.transformers.loop_state import JobRecord, LoopFigures, LoopState
from checkpointing.transformers.train_call import ResilientOptions, Start, TrainCall
from checkpointing.transformers.trainer import ResilientMixin

LAYOUT = StepLayout(1, 2, 2)


class Output(NamedTuple):
    training_loss: float


class Loop:
    """In place of transformers' Trainer."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.while_evaluating: Any = None
        self.is_deepspeed_enabled = False

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        self.calls.append(("train", resume_from_checkpoint, self.args.eval_on_start))  # type: ignore[attr-defined]

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self.calls.append(("prepare", resume_from_checkpoint))
        return "model", train_dataloader

    def _finalize_training(self) -> Output:
        self.log({"train_loss": 99.0})
        return Output(99.0)

    def log(self, logs: dict[str, Any]) -> None:
        self.calls.append(("log", logs))

    def _run_epoch(self, **kwargs: Any) -> None:
        self.calls.append(("epoch", kwargs["num_update_steps_per_epoch"]))

    def get_batch_samples(self, epoch_iterator: Any, *args: Any) -> tuple[list[Any], int]:
        batches = list(epoch_iterator)
        return batches, len(batches)

    def training_step(self, model: Any, inputs: Any) -> torch.Tensor:
        self.calls.append("step")
        return torch.tensor(0.5)

    def compute_loss(self, loss: Any) -> Any:
        return loss

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return (1, 2)

    def get_train_dataloader(self) -> str:
        return "loader"

    def _get_collator_with_removed_columns(self, collator: Any, description: str) -> Any:
        return collator

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, learning_rate: Any = None) -> None:
        self.calls.append(("maybe", grad_norm, learning_rate))
        if self.while_evaluating is not None and self.control.should_evaluate:  # type: ignore[attr-defined]
            self.while_evaluating()


class Subject(ResilientMixin, Loop):
    """The mixin in front of the loop, with a session whose parts are mocks unless given."""

    def __init__(self, start: Start | None = None, **parts: Any) -> None:
        Loop.__init__(self)
        manager = Mock(stage_name="", is_closed=False)
        manager.restoring.folder_of = "/runs/checkpoint-{}".format
        defaults = {
            "data": MagicMock(
                stream=None,
                layout=LAYOUT,
                is_stream=False,
                weighed=lambda batches: batches,
                timed=lambda batches: batches,
            ),
            "guard": StepGuard(),
            "evaluation": InterruptibleEvaluation(manager, 1),
            "throughput": Throughput(),
        }
        self._manager = manager
        self._session = TrainCall(start=start or Start(), **{**defaults, **parts})
        self._options = ResilientOptions()
        skipped: Any = ()
        self._notices, self._skipped, self._beginning, self._adapter = Mock(), skipped, None, None
        self._train_batch_size = 2
        self.args = SimpleNamespace(
            output_dir="out",
            world_size=1,
            process_index=0,
            n_gpu=1,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            eval_on_start=True,
            load_best_model_at_end=False,
            max_grad_norm=1.0,
        )
        self.state = SimpleNamespace(
            global_step=20, max_steps=40, epoch=1.0, log_history=[], best_global_step=None, stateful_callbacks={}
        )
        self.control = SimpleNamespace(should_training_stop=False, should_evaluate=False, should_save=False)
        self.accelerator = SimpleNamespace(scaler=None, optimizer_step_was_skipped=False)
        self.callback_handler = SimpleNamespace(callbacks=[])
        self.model = self.model_wrapped = torch.nn.Linear(1, 1)
        self.optimizer = self.lr_scheduler = None
        self.train_dataset: Any = [1, 2]
        self.data_collator = list
        self._tr_loss, self._total_loss_scalar, self._globalstep_last_logged = torch.tensor(4.0), 60.0, 18
        self.current_flos, self.current_gradient_accumulation_steps = 0, 2
        self.snapshots: list[bool] = []

    def _snapshot(self, *, commit: bool, added: Any = None) -> None:
        self.snapshots.append(commit)


def resumed(**loop_state: Any) -> Start:
    record = JobRecord(LAYOUT, ended=bool(loop_state.pop("ended", False)))
    state = LoopState(0.25, 10, LoopFigures(loss_since=4), total_loss=1.5, **loop_state)
    return Start(point("loop_state_0.json", state.to_bytes()), "/runs/checkpoint-20", "name", record=record)


# -- epochs ----------------------------------------------------------------------------------------------------------


def run_epoch(subject: Subject, *, steps_done: int = 0, steps_in_epoch: int = 40) -> None:
    subject._run_epoch(
        epoch=1,
        steps_trained_in_current_epoch=steps_done,
        steps_in_epoch=steps_in_epoch,
        num_update_steps_per_epoch=20,
    )


def test_an_epoch_is_announced_and_run() -> None:
    subject = Subject()
    run_epoch(subject)
    subject._session.data.cursor.begin_epoch.assert_called_once_with(1)  # type: ignore[union-attr]
    assert subject.calls == [("epoch", 20)] and not subject.control.should_training_stop


@pytest.mark.parametrize("ended", [True, False])
def test_training_that_is_over_runs_no_step(ended: bool) -> None:
    subject = Subject(resumed(ended=ended))
    if not ended:
        subject.state.global_step = 40
    run_epoch(subject)
    assert subject.calls == [] and subject.control.should_training_stop


@pytest.mark.parametrize("why", ["over", "done", "a callback"])
def test_the_end_of_an_epoch_is_all_that_is_left(why: str) -> None:
    over = why == "over"
    subject = Subject(resumed(ended=over))
    if why == "a callback":
        # It has asked for the end of the epoch at the step that was saved.
        subject.state.stateful_callbacks = export_states([TrainerControl(should_epoch_stop=True)])
    run_epoch(subject, steps_done=40 if why == "done" else 20)
    subject._session.data.cursor.skip_epoch.assert_called_once()  # type: ignore[union-attr]
    subject._manager.restoring.restore_rng.assert_called_once()  # type: ignore[attr-defined]
    assert subject.calls == [("epoch", 0)]
    assert subject.control.should_training_stop == over
    assert subject._session.start.pending is None and subject._globalstep_last_logged == 10


# -- the first batch of a resumed run --------------------------------------------------------------------------------


def test_the_loop_is_restored_once_before_the_first_batch() -> None:
    subject = Subject(resumed(), guard=StepGuard(spike_zscore=8.0))
    for _ in range(2):
        assert subject.get_batch_samples(["a", "b"]) == (["a", "b"], 2)
    assert subject._tr_loss == 4.25 and subject._session.figures.loss_since == 4
    assert subject._session.data.consume.call_count == 2  # type: ignore[attr-defined]
    subject._manager.restoring.restore_rng.assert_not_called()  # type: ignore[attr-defined]


def test_a_stream_needs_the_generators_before_its_first_batch() -> None:
    subject = Subject(resumed(), data=MagicMock())
    subject.get_batch_samples([])
    subject._manager.restoring.restore_rng.assert_called_once()  # type: ignore[attr-defined]


def test_an_evaluation_that_was_cut_short_is_repeated() -> None:
    subject = Subject(resumed(evaluation_due=True))
    subject.get_batch_samples([])
    assert subject.calls == [("maybe", None, None)]
    assert subject.control.should_evaluate
    assert subject._session.evaluation.after is not None


# -- steps -----------------------------------------------------------------------------------------------------------


def test_a_skipped_step_computes_nothing_and_leaves_the_mean() -> None:
    subject = Subject()
    skipped: Any = (21, 22)
    subject._skipped = skipped
    # Two steps since the last log entry, with a loss of 2.0 each; two micro-batches per step.
    assert [subject.training_step(None, {}) for _ in range(2)] == [1.0, 1.0]
    assert subject.calls == []
    subject.state.global_step = 22
    assert subject.training_step(None, {"input_ids": torch.zeros(2, 5)}) == 0.5
    assert subject.calls == ["step"]


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trainer_module, "failpoint", lambda name: name == "training.loss")
    return iter(())


def test_a_failpoint_spoils_the_loss_of_training_alone(spoiled: None) -> None:
    subject = Subject()
    assert math.isnan(subject.compute_loss(1.0))
    loss, outputs = subject.compute_loss((1.0, "outputs"))
    assert math.isnan(loss) and outputs == "outputs"
    subject.model.eval()
    assert subject.compute_loss(1.0) == 1.0


def test_a_step_is_judged_before_it_is_logged_or_saved() -> None:
    subject = Subject()
    with pytest.raises(NonFinite):
        subject._maybe_log_save_evaluate(None, float("nan"))
    assert subject.calls == []
    subject = Subject()
    subject.accelerator.scaler = object()
    subject._maybe_log_save_evaluate(None, float("nan"), learning_rate=0.1)
    # At the epoch's end the Trainer has neither.
    subject._maybe_log_save_evaluate(None, None)
    assert [call[2] for call in subject.calls] == [0.1, 0.1]


def test_a_snapshot_that_is_due_is_taken_once_after_logging_and_evaluation() -> None:
    subject = Subject()
    subject._session.due = Due(snapshot=True)
    subject._maybe_log_save_evaluate(None, 1.0)
    subject._maybe_log_save_evaluate(None, 1.0)
    assert subject.snapshots == [False]


def test_an_evaluation_can_be_cut_short_where_the_position_is_known() -> None:
    def cut_short() -> None:
        raise EvaluationCutShort

    for wants in (True, False):
        subject = Subject()
        subject._manager.wants.return_value = wants  # type: ignore[attr-defined]
        subject.control.should_evaluate = subject.control.should_save = True
        seen: list[Any] = []
        subject.while_evaluating = lambda seen=seen, subject=subject: seen.append(subject._session.evaluation.before)
        subject._maybe_log_save_evaluate(None, 1.0)
        assert (seen[0] is not None) == wants and subject._session.evaluation.before is None
    subject.while_evaluating = cut_short
    subject._maybe_log_save_evaluate(None, 1.0)
    assert subject._session.stopping and subject.snapshots == [True]
    assert not subject.control.should_evaluate and not subject.control.should_save


@pytest.mark.parametrize(
    ("step", "answers", "epoch_is_over", "asked"),
    [
        (20, (False, True), False, True),
        (20, (True,), False, True),
        (20, (False, False), False, False),
        # The last step; and the end of an epoch, in which more may be to be trained on.
        (40, (), False, False),
        (20, (), True, False),
    ],
)
def test_a_stop_that_a_callback_sees_first_is_a_stop(
    step: int, answers: tuple[bool, ...], epoch_is_over: bool, asked: bool
) -> None:
    subject = Subject()
    subject.state.global_step, subject._session.epoch_is_over = step, epoch_is_over
    subject._manager.agree_to_stop.side_effect = answers  # type: ignore[attr-defined]
    subject.control.should_training_stop = True
    subject._maybe_log_save_evaluate(None, 1.0)
    assert subject._session.stopping == subject.control.should_save == asked
    assert subject._manager.agree_to_stop.call_count == len(answers)  # type: ignore[attr-defined]


def test_training_that_goes_on_asks_nobody() -> None:
    subject = Subject()
    subject._maybe_log_save_evaluate(None, 1.0)
    subject._manager.agree_to_stop.assert_not_called()  # type: ignore[attr-defined]


# -- the beginning and the end ---------------------------------------------------------------------------------------


def begin(subject: Subject, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "choose_start", lambda *_: start)
    monkeypatch.setattr(trainer_module, "job_of", lambda *_: {"trainer": "Trainer"})
    monkeypatch.setattr(trainer_module, "continue_trackers", lambda callbacks, name: name == "name")
    subject.train()


def test_training_starts_where_all_ranks_have_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject()
    begin(subject, Start(None, "/stock/checkpoint-7", "name"), monkeypatch)
    assert subject.calls == [("train", "/stock/checkpoint-7", True)]
    assert subject._session.has_trackers and subject._session.job == {"trainer": "Trainer"}
    subject._manager.restoring.check_way.assert_called_once_with(0)  # type: ignore[attr-defined]
    subject._notices.forget.assert_called_once()  # type: ignore[attr-defined]


def test_a_resumed_run_does_not_evaluate_first_again(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, start = Subject(), resumed()
    begin(subject, start, monkeypatch)
    assert subject.calls == [("train", "/runs/checkpoint-20", False)] and subject.args.eval_on_start
    subject._manager.restoring.check_way.assert_called_once_with(20)  # type: ignore[attr-defined]
    assert start.point is not None and not start.point.has("loop_state_0.json"), "closed"


def test_another_number_of_ranks_changes_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, start = Subject(), resumed()
    start.record = JobRecord(StepLayout(2, 1, 4))
    begin(subject, start, monkeypatch)
    args = subject.args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (1, 8)
    assert subject._train_batch_size == 1 and subject._session.data.layout == StepLayout(2, 1, 4)


@pytest.mark.parametrize(
    ("start", "deepspeed", "folder"),
    [(resumed(), True, None), (resumed(), False, "/runs/checkpoint-20"), (Start(folder="/stock"), True, "/stock")],
)
def test_deepspeed_does_not_look_for_its_own_files_in_our_checkpoints(
    start: Start, deepspeed: bool, folder: str | None
) -> None:
    subject, config = Subject(start), dict[str, int]()
    subject.is_deepspeed_enabled = deepspeed
    subject.accelerator.state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config))
    subject._further_states = dict  # type: ignore[method-assign]
    assert subject._prepare_for_training(40, "loader", start.folder) == ("model", "loader")
    assert subject.calls == [("prepare", folder)]
    manager: Any = subject._manager
    assert [call[0] for call in manager.method_calls] == (
        ["track", "restoring.restore_model", "restoring.restore_optimizer"] if folder is None else []
    )
    # The engine learns how the samples of a step are shared now.
    assert config.get("train_batch_size") == (4 if deepspeed else None)


def test_another_training_is_another_stage_with_a_fresh_session(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject()
    first, fresh = subject._session, Mock()
    first.stopping = True
    subject._manager.is_closed = True  # type: ignore[misc]
    subject._make_manager = lambda: fresh
    begin(subject, Start(), monkeypatch)
    assert subject._manager is fresh and subject._session is not first and not subject._session.stopping
    assert subject._session.data.layout == first.data.layout


def test_callbacks_states_are_restored_after_they_have_begun() -> None:
    subject = Subject(resumed())
    subject._further_states = lambda: {"callback_A": object(), "average": object()}  # type: ignore[method-assign]
    data: Any = subject._session.data
    data.shared_samples = 4
    subject._on_train_begin()
    (_, names), _ = subject._manager.restoring.restore_states.call_args  # type: ignore[attr-defined]
    assert names == {"callback_A"}
    subject._manager.begin.assert_called_once_with(20, 40)  # type: ignore[attr-defined]
    assert subject._session.figures.loss_since == 20


@pytest.mark.parametrize(("max_steps", "process_index", "says"), [(20, 0, True), (20, 1, False), (40, 0, False)])
def test_one_rank_says_that_no_step_is_left(
    max_steps: int, process_index: int, says: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    subject = Subject(resumed())
    subject._session.data.shared_samples = 4  # type: ignore[misc]
    subject.state.max_steps, subject.args.process_index = max_steps, process_index
    subject._on_train_begin()
    assert ("checkpointing: training had finished already, at step" in capsys.readouterr().err) == says


@pytest.mark.parametrize(("step", "stopping", "finished"), [(40, False, True), (40, True, False), (30, False, False)])
def test_training_is_finished_at_its_last_step(step: int, stopping: bool, finished: bool) -> None:
    subject = Subject()
    subject.state.global_step, subject._session.stopping = step, stopping
    subject._on_train_end()
    assert subject._manager.finished == finished
    subject._manager.close.assert_called_once()  # type: ignore[attr-defined]
    subject._notices.notify_all.assert_called_once()  # type: ignore[attr-defined]


def test_the_loss_at_the_end_is_that_of_the_run() -> None:
    subject = Subject()
    subject._session.figures.loss_since = 8
    subject.log({"train_loss": 99.0})
    assert subject._finalize_training().training_loss == 5.0
    assert subject.calls == [("log", {"train_loss": 99.0}), ("log", {"train_loss": 5.0})]


def test_the_best_model_is_loaded_once_the_last_commit_is_settled(caplog: pytest.LogCaptureFixture) -> None:
    subject = Subject()
    subject.args.load_best_model_at_end, subject.state.best_global_step = True, 10
    subject._manager.wait_for_commit.side_effect = CommitFailed("disk full")  # type: ignore[attr-defined]
    subject._manager.load_best.return_value = 5  # type: ignore[attr-defined]
    subject._finalize_training()
    subject._manager.load_best.assert_called_once_with(20, together=True, preferred=10)  # type: ignore[attr-defined]
    assert subject.state.best_model_checkpoint == "/runs/checkpoint-5"
    assert "disk full" in caplog.text


# -- data and set-up -------------------------------------------------------------------------------------------------


def test_the_loader_is_the_trainers_own_or_a_streams() -> None:
    subject = Subject()
    data: Any = subject._session.data
    data.follow.side_effect = lambda loader, batch_size, start: (loader, batch_size, start)
    assert subject.get_train_dataloader() == ("loader", 2, None)
    data.is_stream = True
    subject.get_train_dataloader()
    data.read_stream.assert_called_once_with([1, 2], list, 2, None)
    assert data.forget_loader.call_count == 2


def test_the_position_is_the_datas() -> None:
    subject = Subject()
    data: Any = subject._session.data
    subject._init_training_state(40, 20)
    data.resume_position.assert_called_once_with(None, (1, 2), 20)


def test_micro_batches_of_one_prompts_groups_cannot_be_cut() -> None:
    subject = Subject()
    subject._buffered_inputs = None
    subject.args.train_batch_size = 2
    with pytest.raises(CheckpointError, match="ran out of memory, and its micro-batches cannot be halved"):
        subject._become_resilient(Mock, ResilientOptions(divisor=2))


def test_only_a_stream_with_a_state_is_seekable() -> None:
    subject = Subject()
    subject.args.train_batch_size = 2
    with pytest.raises(ValueError, match="train_dataset is list"):
        subject._become_resilient(Mock, ResilientOptions(seekable_stream=True))


# -- `load_best_model_at_end` without the Trainer's folders ----------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("/runs/checkpoint-10", [10])),
        ({"wanted": False}, ("/stock/checkpoint-3", [])),
        # The best one could not be read; the next best one was.
        ({"found": 5}, ("/runs/checkpoint-5", [10])),
        ({"found": None}, (None, [10])),
        ({"best": None}, (None, [])),
        ({"stopping": True}, (None, [])),
        ({"fails": True}, ("/runs/checkpoint-10", [10])),
    ],
)
def test_the_best_model_is_loaded_from_our_checkpoints(options: dict[str, Any], expected: Any) -> None:
    subject, loaded = Subject(), list[int]()
    wanted, fails = options.get("wanted", True), options.get("fails", False)
    subject.args.load_best_model_at_end = wanted
    subject.state.best_global_step = options.get("best", 10)
    subject.state.best_model_checkpoint = "/stock/checkpoint-3"
    subject._session.stopping = options.get("stopping", False)

    def load(step: int) -> Any:
        loaded.append(step)
        return options.get("found", 10)

    subject._load_best_of = load  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext(), subject._best_model_at_end():
        # What the Trainer sees: nothing to load or to remove.
        assert not subject.args.load_best_model_at_end
        assert not wanted or subject.state.best_model_checkpoint is None
        if fails:
            raise RuntimeError
    assert subject.args.load_best_model_at_end == wanted
    assert (subject.state.best_model_checkpoint, loaded) == expected
