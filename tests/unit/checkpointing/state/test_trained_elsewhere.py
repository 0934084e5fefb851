"""What an optimizer trains outside of the model is saved by itself, once, and comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.small_training import Average
from unit.checkpointing.state.test_train_state import point

from checkpointing.errors import CheckpointError
from checkpointing.state.train_state import TrainState
from checkpointing.state.trained_elsewhere import TRAINED_STATE


class Holder:
    """Has a module without being one."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.module.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["inner"])


def training(seed: int, size: int = 3, **states: Any) -> tuple[TrainState, torch.nn.Module]:
    torch.manual_seed(seed)
    model, loss = torch.nn.Linear(3, size), torch.nn.Linear(size, 1)
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()], lr=0.1)
    loss(model(torch.randn(4, 3))).sum().backward()
    optimizer.step()
    return TrainState(model, optimizer, states={name: make(model, loss) for name, make in states.items()}), loss


# As a Trainer always has some state, nothing was said of the parameters either.
@pytest.mark.parametrize("states", [{}, {"average": lambda model, _: Average(model)}])
def test_the_parameters_of_a_loss_come_back(states: dict[str, Any]) -> None:
    (written, loss), (read, other) = training(0, **states), training(1)
    saved = point(written.capture(readable=set()))
    read.restore_model(saved)
    read.restore_optimizer(saved, 0)
    for one, two in zip(loss.parameters(), other.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None
        assert torch.equal(one, two) and torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("make", [lambda _, loss: loss, lambda _, loss: Holder(loss)])
def test_what_a_further_state_has_is_not_saved_twice(make: Any) -> None:
    written, _ = training(0, loss=make)
    assert written.capture(readable=set()).states.keys() == {"loss"}


def test_those_of_the_model_are_not_looked_for_elsewhere() -> None:
    model = torch.nn.Linear(2, 2)
    frozen = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert frozen.capture(readable=set()).states == {}


def test_other_parameters_are_refused() -> None:
    (written, _), (read, _) = training(0), training(1, size=4)
    saved = point(written.capture(readable=set()))
    with pytest.raises(CheckpointError, match=r"the shapes were \[\(1, 3\), \(1,\)\], and are \[\(1, 4\), \(1,\)\]"):
        read.restore_states(saved, 0, {TRAINED_STATE})


def test_a_checkpoint_without_them_is_said(caplog: pytest.LogCaptureFixture) -> None:
    read, _ = training(1)
    saved = point(TrainState(read.model, torch.optim.SGD(read.model.parameters())).capture())
    read.restore_states(saved, 0, {TRAINED_STATE})
    assert "holds no state 'trained_parameters'" in caplog.text


class Sparse:
    """Holds what has no memory of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": torch.eye(3).to_sparse()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_sparse_state_is_no_place_for_parameters() -> None:
    """It ended the save with torch's own error, instead of being refused by its name."""
    written, _ = training(0, sparse=lambda *_: Sparse())
    assert TRAINED_STATE in written.capture(readable=None).states
