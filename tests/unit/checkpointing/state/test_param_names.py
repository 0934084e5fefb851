"""State dicts of optimizers whose parameters are found by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpointing.state.param_names import are_named, matched_by_name, matched_to


def stepped(model: torch.nn.Module, parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    return optimizer


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


@pytest.mark.parametrize("named", [False, True])
def test_another_order_is_matched(named: bool) -> None:
    """torch would give each parameter the moments of another one, names or not."""
    written = model()
    state = stepped(written, reversed(list(written.named_parameters()))).state_dict()
    assert are_named(state["param_groups"])
    own = model()
    optimizer = torch.optim.AdamW(own.named_parameters() if named else own.parameters(), lr=0.5)
    optimizer.load_state_dict(matched_to(optimizer, own, state))
    for number, parameter in enumerate(own.parameters()):
        assert torch.allclose(optimizer.state[parameter]["exp_avg"], torch.tensor(0.1 * (number + 1)))
    assert are_named(optimizer.param_groups) is named


@pytest.mark.parametrize("prefix", [None, "module."])
def test_without_names_or_with_others_the_order_counts(prefix: str | None) -> None:
    written = model()
    names = [(f"{prefix}{name}", value) for name, value in written.named_parameters()]
    state = stepped(written, written.parameters() if prefix is None else names).state_dict()
    own = model()
    optimizer = torch.optim.AdamW(own.parameters())
    matched = matched_to(optimizer, own, state)
    assert matched["param_groups"][0]["params"] == [0, 1, 2, 3] and not are_named(matched["param_groups"])


def test_fewer_parameters_are_a_part_only_where_that_is_wanted() -> None:
    written = model()
    state = stepped(written, written.named_parameters()).state_dict()
    order = [["1.bias", "0.weight"]]
    assert matched_by_name(state, order, partial=True)["param_groups"][0]["params"] == [3, 0]
    assert len(matched_by_name(state, order)["param_groups"][0]["params"]) == 4
