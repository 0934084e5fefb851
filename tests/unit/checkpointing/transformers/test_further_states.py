"""What TRL's trainers and callbacks keep besides the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from checkpointing.transformers.further_states import Attributes, further_states, generates_ahead


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
