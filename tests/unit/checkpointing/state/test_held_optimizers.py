"""Optimizers that hold another one, or have a layout of their own: resumed exactly, or refused at the first save."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from helpers.holding_optimizers import Forgetful, LayerWise, Lookahead, Sam, Unloadable, adamw, train, weights
from helpers.small_training import SmallTraining
from unit.checkpointing.state.test_train_state import network, point

from checkpointing.errors import CheckpointError
from checkpointing.state.held_optimizers import announces_steps, held_by, inner_optimizer, is_of_torch
from checkpointing.state.train_state import TrainState

Make = Callable[[torch.nn.Module], Any]


def lookahead(model: torch.nn.Module) -> Any:
    return Lookahead(adamw(model))


def shared(model: torch.nn.Module) -> Any:
    return Sam(adamw(model), is_shared=True)


def separate(model: torch.nn.Module) -> Any:
    return Sam(adamw(model))


def tracked(model: torch.nn.Module, optimizer: Any, *, with_base: bool) -> TrainState:
    return TrainState(model, optimizer, states={"base": optimizer.base_optimizer} if with_base else {})


@pytest.mark.parametrize("is_private", [True, False])
@pytest.mark.parametrize(("make", "with_base"), [(lookahead, False), (shared, False), (separate, True)])
def test_what_one_holds_continues_as_if_it_had_never_ended(make: Make, with_base: bool, is_private: bool) -> None:
    """The groups' options, too: what steps must have those that a schedule changes later."""
    model = network()
    optimizer = make(model)
    train(model, optimizer, range(3))
    saved = point(tracked(model, optimizer, with_base=with_base).capture(readable=set()))
    saved.private = is_private
    bytes_before = bytes(saved.files["optimizer.pt"])
    memory = saved.files["optimizer.pt"]
    other = network(1)
    resumed = make(other)
    train(other, resumed, range(100, 101))
    state = tracked(other, resumed, with_base=with_base)
    state.restore_model(saved)
    state.restore_optimizer(saved, 0)
    for one, its in ((model, optimizer), (other, resumed)):
        its.param_groups[0]["lr"] = 0.05
        train(one, its, range(3, 6))
    assert torch.equal(weights(model), weights(other))
    assert is_private or bytes(memory) == bytes_before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (separate, r"Sam holds optimizers whose state is not in what its state_dict returns \(AdamW\)"),
        (LayerWise, r"LayerWise holds optimizers whose state is not in what its state_dict returns \(AdamW\)"),
        (lambda model: Forgetful(adamw(model)), r"comes back changed .*\(state_dict\(\)\['lookahead'\]\[0\]\['slow'\]"),
        (lambda model: Unloadable(adamw(model)), r"does not load what its own state_dict returns \(KeyError"),
    ],
)
def test_what_could_not_be_resumed_is_refused_at_the_first_save(make: Make, message: str) -> None:
    model = network()
    optimizer = make(model)
    train(model, optimizer, range(3))
    with pytest.raises(CheckpointError, match=message):
        TrainState(model, optimizer).capture(readable=set())


def test_the_check_changes_nothing() -> None:
    model = network()
    optimizer = lookahead(model)
    train(model, optimizer, range(3))
    held = [value for one in (optimizer, optimizer.optimizer) for own in one.state.values() for value in own.values()]
    before = [value.clone() for value in held]
    TrainState(model, optimizer).capture(readable=set())
    now = [value for one in (optimizer, optimizer.optimizer) for own in one.state.values() for value in own.values()]
    assert all(one is other for one, other in zip(held, now, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(before, now, strict=True))


def test_a_layout_of_its_own_is_loaded_by_the_same_parameters_in_the_same_order_only() -> None:
    model, other = network(), network(1)
    optimizer = lookahead(model)
    train(model, optimizer, range(2))
    saved = point(TrainState(model, optimizer).capture(readable=set()))
    resumed = Lookahead(torch.optim.AdamW(reversed(list(other.parameters()))))
    with pytest.raises(CheckpointError, match="has other parameters now, or has them in another order"):
        TrainState(other, resumed).restore_optimizer(saved, 0)


def test_a_layout_of_its_own_is_refused_where_parameters_are_sharded() -> None:
    model = network()
    kind: Any = SimpleNamespace(is_cut=True)
    with pytest.raises(CheckpointError, match="Lookahead is not supported where parameters are sharded"):
        TrainState(model, lookahead(model))._optimizer_files({}, kind)


def accelerated(optimizer: Any) -> Any:
    """In accelerate's wrapper, whose constructor wants an Accelerator."""
    made: Any = AcceleratedOptimizer.__new__(AcceleratedOptimizer)
    made.optimizer = optimizer
    return made


def test_only_wrappers_that_pass_on_are_looked_through() -> None:
    held = adamw(network())
    assert inner_optimizer(accelerated(accelerated(held))) is held
    outer = Lookahead(held)
    assert inner_optimizer(outer) is outer and inner_optimizer(accelerated(outer)) is outer


def test_what_is_held_is_found_in_attributes_and_containers() -> None:
    model = network()
    inner = adamw(model)
    assert held_by(inner) == [] and held_by(object()) == []
    assert held_by(SimpleNamespace(all=[{"one": Lookahead(inner)}]))[1:] == [inner]
    assert len(held_by(LayerWise(model))) == 4


def test_layouts_are_told_apart() -> None:
    model = network()
    assert is_of_torch(adamw(model).state_dict()) and not is_of_torch(lookahead(model).state_dict())
    assert not any(map(is_of_torch, ({}, [], {"param_groups": [], "state": []}, {"state": {}, "param_groups": [1]})))


def test_only_an_optimizer_by_itself_announces_its_steps() -> None:
    """A wrapper may write before the one that it holds steps."""
    model = network()
    assert announces_steps(adamw(model))
    assert not any(map(announces_steps, (lookahead(model), shared(model), LayerWise(model), object())))


def test_training_waits_for_copies_where_a_wrapper_writes_before_hooks_are_called() -> None:
    training = SmallTraining(overlap=True)
    optimizer = training.optimizer = Sam(training.optimizer, is_shared=True)
    training.train_state = TrainState(training.model, optimizer, states={"average": training.average})
    for _ in range(20):
        training.snapshot()
        optimizer.first_step()
        training.optimizer_step()
    training.close()
    assert training.torn() == [] and training.arenas.abandoned == [] and len(training.arenas.staged_steps) == 20
