"""Models and optimizers that training changes: resumed, or refused by the save that could not be resumed from."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.holding_optimizers import train, weights
from unit.checkpointing.doubles import Connection, manager, options
from unit.checkpointing.state.test_train_state import point

from checkpointing.errors import CheckpointError
from checkpointing.manager.manager import CheckpointManager
from checkpointing.state.train_state import TrainState

pruning = importlib.import_module("torch.nn.utils.prune")
Change = Callable[[Any, Any], object]


class Remembers(torch.nn.Module):
    """Buffers that come, grow and change their type as it computes; a layer whose shape its first batch tells."""

    means: Any
    scale: Any
    count: Any

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = torch.nn.LazyLinear(4), torch.nn.Linear(4, 2)
        self.register_buffer("means", torch.zeros(0))
        self.register_buffer("scale", None)
        self.register_buffer("count", torch.zeros((), dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self.last, "mask"):
            self.last.register_buffer("mask", torch.rand(4))
        if self.scale is None:
            self.scale = torch.rand(1)
        self.count = self.count.double() + 0.5
        self.means = torch.cat([self.means, x.mean().reshape(1).detach()])
        mask: Any = self.last.mask
        found: torch.Tensor = self.last(self.layer(x) * mask * self.scale * self.means.mean() * self.count)
        return found


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def begun(folder: Path, model: torch.nn.Module, optimizer: Any) -> CheckpointManager:
    own = manager(options(folder), Connection(folder))
    own.track(model=model, optimizer=optimizer)
    own.begin(0)
    return own


def state_of(own: CheckpointManager) -> TrainState:
    return own._tracked.state


def test_buffers_that_training_makes_or_changes_are_put_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = Remembers(), Remembers()
    optimizer, resumed = adamw(model), adamw(other)
    own = begun(tmp_path, model, optimizer)
    train(model, optimizer, range(3))
    saved = point(state_of(own).capture(readable=set()))
    state = TrainState(other, resumed)
    state.restore_model(saved)
    state.restore_optimizer(saved, 0)
    for one, its in ((model, optimizer), (other, resumed)):
        train(one, its, range(3, 6))
    assert len(other.means) == 6 and other.count.dtype is torch.float64
    assert {name: value.tolist() for name, value in other.state_dict().items()} == {
        name: value.tolist() for name, value in model.state_dict().items()
    }
    own.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model, _: pruning.random_unstructured(model[0], "weight", 0.5),
            r"2 tensors \(0\.weight_orig is new, 0\.weight is gone\)",
        ),
        (lambda model, _: model.append(torch.nn.Linear(4, 4)), r"2 tensors \(2\.weight is new, 2\.bias is new\)"),
        (lambda model, _: model.append(torch.nn.BatchNorm1d(4, affine=False)), r"2\.running_mean is new"),
        (lambda model, _: model[1].__setattr__("running_mean", None), r"1\.running_mean is gone"),
        (
            lambda model, _: model[0].__setattr__("weight", torch.nn.Parameter(torch.rand(4, 3)[:, :2])),
            r"0\.weight is of shape \(4, 2\), not \(4, 3\)",
        ),
        (lambda model, _: model.double(), r"0\.weight is of torch\.float64, not torch\.float32"),
        (
            lambda model, optimizer: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.rand(2))]}),
            r"the optimizer has groups of \[4, 1\] parameters, and had \[4\] when training began",
        ),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_fresh_start_could_not_load_is_refused_when_it_is_saved(
    change: Change, message: str, is_first: bool, tmp_path: Path
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = adamw(model)
    own = begun(tmp_path, model, optimizer)
    if not is_first:
        state_of(own).capture(readable=set())
    change(model, optimizer)
    # As a trainer does before each save.
    own.track(model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match=message):
        state_of(own).capture(readable=set() if is_first else {object()})
    own.close()


def test_what_is_changed_before_training_begins_is_what_a_fresh_start_has(tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4))
        pruning.l1_unstructured(model[0], "weight", 0.5)
        return model, adamw(model)

    (model, optimizer), (other, resumed) = made(), made()
    own = begun(tmp_path, model, optimizer)
    train(model, optimizer, range(2))
    saved = point(state_of(own).capture(readable=set()))
    state = TrainState(other, resumed)
    state.restore_model(saved)
    state.restore_optimizer(saved, 0)
    assert torch.equal(weights(model), weights(other))
    own.close()


def test_what_is_restored_is_no_fresh_start(tmp_path: Path) -> None:
    """A resumed run would take the buffers that it has put in for the script's, and the run after it lack them."""
    torch.manual_seed(0)
    model, other, third = Remembers(), Remembers(), Remembers()
    own = begun(tmp_path, model, optimizer := adamw(model))
    train(model, optimizer, range(2))
    saved = point(state_of(own).capture(readable=set()))
    again = manager(options(tmp_path), Connection(tmp_path))
    again.track(model=other, optimizer=(resumed := adamw(other)))
    again.restoring.restore_model(saved)
    again.restoring.restore_optimizer(saved)
    again.begin(1)
    train(other, resumed, range(2, 3))
    state = TrainState(third, adamw(third))
    state.restore_model(point(state_of(again).capture(readable=set())))
    assert len(third.means) == 3 and torch.equal(third.means, other.means)
    own.close()
    again.close()


def test_a_group_without_parameters_is_kept() -> None:
    model, other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)

    def made(of: torch.nn.Module) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": []}, {"params": list(of.parameters())}, {"params": [], "lr": 0.5}]
        return torch.optim.AdamW(groups, lr=0.1)

    optimizer, resumed = made(model), made(other)
    train(model, optimizer, range(2))
    optimizer.param_groups[2]["lr"] = 0.25
    saved = point(TrainState(model, optimizer).capture(readable=set()))
    TrainState(other, resumed).restore_optimizer(saved, 0)
    assert [group["lr"] for group in resumed.param_groups] == [0.1, 0.1, 0.25] and len(resumed.state) == 2


class NoGroups:
    """The least that an optimizer can be, with groups as an empty list."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.velocity = [torch.zeros_like(value) for value in model.parameters()]
        self.param_groups: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"velocity": self.velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for velocity, saved in zip(self.velocity, state["velocity"], strict=True):
            velocity.copy_(saved)


def test_an_optimizer_without_groups_loads_its_own_state() -> None:
    model, other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    optimizer, resumed = NoGroups(model), NoGroups(other)
    optimizer.velocity[0].fill_(3)
    saved = point(TrainState(model, optimizer).capture(readable=set()))
    TrainState(other, resumed).restore_optimizer(saved, 0)
    assert torch.equal(resumed.velocity[0], optimizer.velocity[0])
