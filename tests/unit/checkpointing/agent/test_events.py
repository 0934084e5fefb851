"""Events as JSON objects."""

from __future__ import annotations

from checkpointing.agent.events import Committed, Evaluated, Event, Log, MemoryShort


def test_an_event_is_its_name_and_its_fields_but_for_those_that_are_none() -> None:
    assert Committed(step=5).to_dict() == {"event": "committed", "step": 5, "tier": "local"}
    assert MemoryShort(arenas=1, reason="").to_dict() == {"event": "memory_short", "arenas": 1, "reason": ""}


def test_metrics_are_fields_and_replace_none() -> None:
    event = Log(step=5, loss=1.0, metrics={"learning_rate": 0.1, "step": 7.0})
    assert event.to_dict() == {"event": "log", "step": 5, "loss": 1.0, "learning_rate": 0.1}
    assert (event.metric("learning_rate"), event.metric("grad_norm")) == (0.1, None)
    assert Evaluated(step=5, metrics={"eval_loss": 2.0}).to_dict()["eval_loss"] == 2.0


def test_a_step_is_counted_over_all_stages() -> None:
    assert Committed(step=5).step_of_run == 5
    assert Committed(step=5, run_step=25, stage="stage-2").step_of_run == 25


def test_every_event_has_a_name_of_its_own() -> None:
    assert all(kind.name == name for name, kind in Event.known.items())
    assert {"committed", "log", "fenced"} <= Event.known.keys()
