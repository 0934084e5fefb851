"""Gradients of virtual ranks on one rank; several ranks are in tests/integration/test_exact.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from checkpointing.errors import CheckpointError
from checkpointing.exact.gradients import ExactGradients
from checkpointing.exact.summation import TreeNode, total


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Dropout(0.3), torch.nn.Linear(7, 2))


def batch(step: int, virtual_rank: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(step * 100 + virtual_rank))


def by_hand(virtual_ranks: int, step: int) -> list[torch.Tensor]:
    """Each virtual rank by itself, added by the tree."""
    model = net()
    exact = ExactGradients(model, virtual_ranks)
    leaves: dict[TreeNode, Sequence[torch.Tensor]] = {}
    for virtual_rank in range(virtual_ranks):
        model.zero_grad()
        with exact.drawing(virtual_rank, step, 0):
            model(batch(step, virtual_rank)).square().sum().backward()
        leaves[TreeNode(virtual_rank)] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    found = total(leaves, virtual_ranks, lambda one, other: [a + b for a, b in zip(one, other, strict=True)])
    return [value / virtual_ranks for value in found]


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("virtual_ranks", [1, 2, 3, 6, 8])
def test_the_mean_is_that_of_the_tree(virtual_ranks: int, on_host: bool) -> None:
    model = net()
    exact = ExactGradients(model, virtual_ranks, on_host=on_host)
    for step in (0, 1):
        model.zero_grad()
        for virtual_rank in exact.block:
            with exact.of_rank(virtual_rank, step):
                model(batch(step, virtual_rank)).square().sum().backward()
        found = [parameter.grad for parameter in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(found, by_hand(virtual_ranks, step), strict=True) if a is not None)


def test_generators_are_those_of_the_virtual_rank_and_are_left_alone() -> None:
    exact = ExactGradients(net(), 4, seed=7)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    draws = []
    for place in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)):
        with exact.drawing(*place):
            draws.append(float(torch.rand(())))
    assert len(set(draws)) == 4 and draws[0] == draws[-1]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_parameter_that_nobody_uses_is_left_alone() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
    exact = ExactGradients(model, 2)
    for virtual_rank in exact.block:
        with exact.of_rank(virtual_rank, 0):
            model[0](torch.ones(2)).backward()
    assert model[0].weight.grad is not None and model[1].weight.grad is None


@pytest.mark.parametrize("virtual_ranks", [2, 3])
def test_a_parameter_that_some_virtual_ranks_use_is_refused(virtual_ranks: int) -> None:
    """Also if it is the last one that does not: its gradients would be lost."""
    model = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
    exact = ExactGradients(model, virtual_ranks)
    with pytest.raises(CheckpointError, match="gradients of some virtual ranks only"):
        for virtual_rank in exact.block:
            with exact.of_rank(virtual_rank, 1):
                model[virtual_rank % 2](torch.ones(2)).backward()


def test_parameters_may_be_in_any_order_of_dimensions() -> None:
    grads = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=memory_format)  # type: ignore[call-overload]
        exact = ExactGradients(model, 3)
        for virtual_rank in exact.block:
            with exact.of_rank(virtual_rank, 0):
                model(torch.ones(1, 3, 5, 5) * (virtual_rank + 1)).sum().backward()
        grads.append(model.weight.grad)
    assert torch.equal(grads[0], grads[1])


def test_more_ranks_than_virtual_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    with pytest.raises(CheckpointError, match="3 ranks cannot share 2 virtual ranks"):
        ExactGradients(net(), 2)
    with pytest.raises(CheckpointError, match="need a model in DistributedDataParallel"):
        ExactGradients(net(), 4)
