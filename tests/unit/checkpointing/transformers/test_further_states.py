"""What TRL's trainers and callbacks keep besides the model, and what no checkpoint holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerControl
from transformers.trainer_callback import ExportableState, TrainerCallback

from checkpointing.transformers.further_states import (
    Attributes,
    RunningStatistics,
    changed,
    export_states,
    further_states,
    generates_ahead,
    restore_states,
    stops_epoch,
    uncovered,
)


class SyncRefModelCallback:
    def __init__(self, ref_model: object) -> None:
        self.ref_model = ref_model


class Average:
    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def trainer(*callbacks: Any, **attributes: Any) -> Any:
    return SimpleNamespace(
        callback_handler=SimpleNamespace(callbacks=list(callbacks)),
        accelerator=SimpleNamespace(unwrap_model=lambda model: f"unwrapped {model}"),
        _adapter=None,
        **attributes,
    )


def test_a_stock_trainer_has_none() -> None:
    assert further_states(trainer(object())) == {} and not generates_ahead(trainer())


def test_a_generation_buffer_is_saved_with_the_counters_of_its_use() -> None:
    source = trainer(_buffered_inputs=[1], _step=3, _buffer_step=4, other=5)
    assert generates_ahead(source)
    assert further_states(source)["generation_buffer"].state_dict() == {
        "_buffered_inputs": [1],
        "_step": 3,
        "_buffer_step": 4,
    }


def test_figures_between_two_log_entries_are_copied() -> None:
    source = trainer(stats={"a": [1.0]}, aux_loss_total=2.0)
    state = further_states(source)["figures"].state_dict()
    source.stats["a"].append(3.0)
    assert state == {"stats": {"a": [1.0]}, "aux_loss_total": 2.0}
    other = trainer(stats={}, aux_loss_total=0.0)
    further_states(other)["figures"].load_state_dict(state)
    assert (other.stats, other.aux_loss_total) == ({"a": [1.0]}, 2.0)


def test_callbacks_with_a_state_and_reference_models_are_saved() -> None:
    average = Average()
    states = further_states(trainer(average, SyncRefModelCallback("ref"), object()))
    assert states == {"callback_Average": average, "ref_model": "unwrapped ref"}


def test_attributes_are_chosen_by_name() -> None:
    owner = SimpleNamespace(a=1, b=2)
    chosen = Attributes(owner, lambda name: name == "a")
    assert chosen.state_dict() == {"a": 1}
    chosen.load_state_dict({"a": 5})
    assert owner == SimpleNamespace(a=5, b=2)


def test_several_callbacks_of_a_class_are_saved_each() -> None:
    one, other = Average(), Average()
    assert further_states(trainer(one, other)) == {"callback_Average": one, "callback_Average_2": other}


def test_the_running_statistics_of_a_base_are_kept() -> None:
    """They were in no checkpoint of its adapter: a resumed run began with those of the base."""
    layers = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4, track_running_stats=False)
    config = peft.LoraConfig(r=2, target_modules=["0"])
    trained = peft.get_peft_model(torch.nn.Sequential(*layers), config)
    fresh = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)), config)
    trained(torch.randn(8, 4))
    saved = RunningStatistics(trained).state_dict()
    assert len(saved) == 3
    RunningStatistics(fresh).load_state_dict(saved)
    assert all(torch.equal(value, saved[name]) for name, value in RunningStatistics(fresh).state_dict().items())


# -- states of `ExportableState` callbacks, exported and restored in place ---------------------------------------------


class Counter(TrainerCallback, ExportableState):
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


def test_several_callbacks_of_one_class_keep_their_own_states() -> None:
    stopping = EarlyStoppingCallback(early_stopping_patience=3)
    stopping.early_stopping_patience_counter = 2
    control = TrainerControl(should_save=True)
    saved = export_states([Counter(1), stopping, Counter(2), TrainerCallback(), control])
    assert saved.keys() == {"Counter", "EarlyStoppingCallback", "TrainerControl"}
    again, counters, other_control = EarlyStoppingCallback(3), [Counter(), Counter()], TrainerControl()
    restore_states([*counters, again, other_control, TrainerCallback()], saved)
    assert again.early_stopping_patience_counter == 2
    assert [counter.count for counter in counters] == [1, 2]
    # It belongs to the loop.
    assert not other_control.should_save


def test_callbacks_that_came_or_went_are_passed_over() -> None:
    counters = [Counter(), Counter(9)]
    restore_states(counters, {"Counter": {"attributes": {"count": 5}}, "Gone": {"attributes": {"x": 1}}})
    assert [counter.count for counter in counters] == [5, 9]


def test_something_else_is_an_error() -> None:
    with pytest.raises(AttributeError):
        restore_states([Counter()], {"Counter": 3})


@pytest.mark.parametrize("stops", [True, False])
def test_whether_the_epoch_was_to_end_is_known(stops: bool) -> None:
    assert stops_epoch(export_states([TrainerControl(should_epoch_stop=stops)])) is stops
    assert not stops_epoch({})


# -- what no checkpoint holds ------------------------------------------------------------------------------------------


class Own:
    def __init__(self) -> None:
        self.count, self.average, self.odd = 0, torch.zeros(2), object()
        self.history: list[Any] = [1, {"a": None}]


def holding(*callbacks: Any, **attributes: Any) -> Any:
    model = torch.nn.Linear(1, 1)
    handler = SimpleNamespace(callbacks=list(callbacks))
    return SimpleNamespace(callback_handler=handler, model=model, model_wrapped=model, **attributes)


def test_what_a_callback_of_the_script_changes_is_named() -> None:
    own = Own()
    subject = holding(own)
    before = uncovered(subject, set())
    own.count, own.odd = 1, object()
    own.average += 1
    own.history[1]["a"] = 2
    assert changed(before, uncovered(subject, set())) == ["Own.average", "Own.count", "Own.history"]


def test_a_callback_without_a_value_hides_no_other_of_its_class() -> None:
    first, second = Own(), Own()
    second.count = object()  # type: ignore[assignment]
    subject = holding(first, second)
    before = uncovered(subject, set())
    first.count = 1
    assert "Own.count" in changed(before, uncovered(subject, set()))


def test_what_is_saved_is_not_named() -> None:
    own, stopping = Own(), EarlyStoppingCallback()
    subject = holding(own, stopping)
    before = uncovered(subject, {id(own)})
    own.count, stopping.early_stopping_patience_counter = 1, 1
    subject.model.weight.data.fill_(3.0)
    assert changed(before, uncovered(subject, {id(own)})) == []


def test_of_a_trainer_only_what_holds_tensors_counts() -> None:
    subject = holding(teacher=torch.nn.Linear(2, 2), generator=torch.Generator(), count=0, _private=torch.zeros(1))
    before = uncovered(subject, set())
    subject.teacher.weight.data.fill_(1.0)
    torch.rand((), generator=subject.generator)
    subject.count, subject._private = 1, torch.ones(1)
    names = changed(before, uncovered(subject, set()))
    assert names == ["SimpleNamespace.generator", "SimpleNamespace.teacher"]


def test_a_loss_is_named_only_where_it_has_more_than_is_trained() -> None:
    """That of sentence-transformers has the model in it; other parameters are saved by the optimizer's order."""
    subject = holding(loss=torch.nn.Linear(2, 2), counting=torch.nn.BatchNorm1d(2))
    trained = [*subject.loss.parameters(), *subject.counting.parameters()]
    subject.loss.model, subject.optimizer = subject.model, torch.optim.SGD(trained, lr=0.1)
    before = uncovered(subject, set())
    for tensor in (*trained, subject.counting.running_mean):
        tensor.data.fill_(3.0)
    assert changed(before, uncovered(subject, set())) == ["SimpleNamespace.counting"]
