"""What TRL's trainers and callbacks keep besides the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState, TrainerCallback

from checkpointing.proof.coverage import held_by
from checkpointing.transformers.further_states import (
    Attributes,
    RunningStatistics,
    export_states,
    exported_by_the_loop,
    further_states,
    generates_ahead,
    restore_states,
    stops_epoch,
    watched,
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


def test_callbacks_of_one_class_and_what_is_put_on_the_trainers_state_are_watched() -> None:
    first, second = EarlyStoppingCallback(1), EarlyStoppingCallback(2)
    state: Any = TrainerState()
    source = trainer(first, second, model_wrapped=torch.nn.Linear(1, 1), state=state)
    assert list(watched(source)) == ["EarlyStoppingCallback", "EarlyStoppingCallback[1]", "SimpleNamespace"]
    state.best_weights = [1]
    found: Any = watched(source)
    assert found["EarlyStoppingCallback[1]"] is second and vars(found["state"]) == {"best_weights": [1]}


class Patience(EarlyStoppingCallback):
    def __init__(self) -> None:
        super().__init__(2)
        self.seen = 0


def test_of_a_scripts_exportable_callback_what_it_exports_is_known() -> None:
    own, library = Patience(), EarlyStoppingCallback(1)
    [(callback, state)] = exported_by_the_loop(trainer(own, library))
    assert callback is own and "seen" not in held_by(own, state)
    assert {"early_stopping_patience", "early_stopping_patience_counter"} <= held_by(own, state)


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
