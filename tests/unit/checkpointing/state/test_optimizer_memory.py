"""What holds an optimizer's tensors before a restore has the restored values afterwards."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from helpers.small_checkpoint import point

from checkpointing.files.torch_files import torch_bytes
from checkpointing.format.layout import OPTIMIZER_NAME
from checkpointing.state.optimizer_memory import OptimizerMemory
from checkpointing.state.train_state import TrainState


def trained(steps: int, kind: Any = torch.optim.AdamW, **options: Any) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(steps)
    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=options.pop("lr", 0.1), **options)
    for _ in range(steps):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def saved(optimizer: Any) -> Any:
    return point(OPTIMIZER_NAME, torch_bytes(copy.deepcopy(optimizer.state_dict())))


@pytest.mark.parametrize("private", [True, False])
def test_moments_and_counts_are_restored_in_place(private: bool) -> None:
    (_, source), (model, optimizer) = trained(5), trained(2)
    held = [value for own in optimizer.state.values() for value in own.values()]
    found = saved(source)
    found.private = private
    TrainState(model, optimizer).restore_optimizer(found, 0)
    now = [value for own in optimizer.state.values() for value in own.values()]
    assert all(one is other for one, other in zip(held, now, strict=True))
    wanted = [value for own in source.state.values() for value in own.values()]
    assert all(torch.equal(one, other) for one, other in zip(held, wanted, strict=True))


def test_a_rate_in_a_tensor_is_restored_in_place() -> None:
    options: dict[str, Any] = {"capturable": False, "foreach": True}
    (_, source), (model, optimizer) = trained(3, **options), trained(1, **options)
    source.param_groups[0]["lr"], optimizer.param_groups[0]["lr"] = torch.tensor(0.5), torch.tensor(0.1)
    rate = optimizer.param_groups[0]["lr"]
    TrainState(model, optimizer).restore_optimizer(saved(source), 0)
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) == 0.5


def test_an_optimizer_without_state_takes_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    (_, source), (model, optimizer) = trained(5), trained(0)
    with caplog.at_level(logging.WARNING):
        TrainState(model, optimizer).restore_optimizer(saved(source), 0)
    assert len(optimizer.state) == 2 and not caplog.text


def test_what_cannot_be_kept_is_said(caplog: pytest.LogCaptureFixture) -> None:
    (_, source), (model, optimizer) = trained(0), trained(2)
    with caplog.at_level(logging.WARNING):
        TrainState(model, optimizer).restore_optimizer(saved(source), 0)
    assert "3 tensors of the optimizer (exp_avg, exp_avg_sq, step) are new ones" in caplog.text


def test_a_further_optimizer_is_restored_in_place() -> None:
    (_, source), (model, optimizer) = trained(5), trained(2)
    held = next(iter(optimizer.state.values()))["exp_avg"]
    other = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    restored = TrainState(model, other, states={"second": optimizer})
    restored.restore_states(point("second.pt", torch_bytes(source.state_dict())), 0, {"second"})
    assert next(iter(optimizer.state.values()))["exp_avg"] is held
    assert torch.equal(held, next(iter(source.state.values()))["exp_avg"])


def test_other_objects_have_no_memory_of_this_kind() -> None:
    assert OptimizerMemory([object(), torch.nn.Linear(1, 1)]).put_back() == []


def test_what_holds_the_groups_or_the_state_sees_what_is_restored() -> None:
    """A wrapper around the optimizer steps by both."""
    (_, source), (model, optimizer) = trained(5), trained(2)
    source.param_groups[0]["lr"] = 0.3
    state, groups, group = optimizer.state, optimizer.param_groups, optimizer.param_groups[0]
    TrainState(model, optimizer).restore_optimizer(saved(source), 0)
    assert optimizer.state is state and optimizer.param_groups is groups and groups[0] is group
    assert group["lr"] == 0.3 and float(state[model.weight]["step"]) == 5
