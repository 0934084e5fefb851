"""Optimizers that hold another one, as libraries have them."""

from __future__ import annotations

import itertools
from typing import Any

import torch


class Lookahead(torch.optim.Optimizer):
    """As pytorch_optimizer's: slow weights besides, in a layout of its own; torch's constructor is not called."""

    def __init__(self, optimizer: torch.optim.Optimizer, every: int = 2) -> None:
        self.optimizer, self.every, self.count = optimizer, every, 0
        parameters = (value for group in optimizer.param_groups for value in group["params"])
        self.state: Any = {value: {"slow": value.detach().clone()} for value in parameters}

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.count += 1
        for value, own in self.state.items():
            if self.count % self.every == 0:
                value.lerp_(own["slow"], 0.5)
                own["slow"].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        slow = {number: dict(own) for number, own in enumerate(self.state.values())}
        return {"lookahead": slow, "count": self.count, "base_optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state["base_optimizer"])
        self.state = {value: dict(state["lookahead"][number]) for number, value in enumerate(self.state)}
        self.count = state["count"]


class Sam(torch.optim.Optimizer):
    """As the SAM that most copy: the held optimizer's own state is in no state dict.

    Args:
        is_shared: It is in that of this one, and only found there.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, is_shared: bool = False) -> None:
        super().__init__(optimizer.param_groups, {})
        self.base_optimizer = optimizer
        self.param_groups = optimizer.param_groups
        if is_shared:
            self.state = optimizer.state

    @torch.no_grad()
    def first_step(self) -> None:
        """Write without a hook."""
        for group in self.param_groups:
            for value in group["params"]:
                value.add_(0.01)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                value.sub_(0.01)
        self.base_optimizer.step()


class LayerWise(torch.optim.Optimizer):
    """As transformers' dummy of layer-wise optimizers, which step while gradients are computed."""

    def __init__(self, model: torch.nn.Module) -> None:
        parameters = list(model.parameters())
        self.optimizer_dict = {value: torch.optim.AdamW([value], lr=0.1) for value in parameters}
        super().__init__([torch.zeros(1, 1)], {"lr": 0.1})
        hooked: list[Any] = parameters
        for value in hooked:
            value.register_post_accumulate_grad_hook(self._step_one)

    def _step_one(self, value: torch.Tensor) -> None:
        self.optimizer_dict[value].step()  # type: ignore[index]
        value.grad = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class Forgetful(Lookahead):
    """Leaves the slow weights out when it loads them."""

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state["base_optimizer"])
        self.state = {value: {"slow": value.detach().clone()} for value in self.state}


class Unloadable(Lookahead):
    """Cannot load at all."""

    def load_state_dict(self, state: Any) -> None:
        raise KeyError("param_groups")


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    """Each step by itself: a function of its number."""
    for step in steps:
        optimizer.zero_grad()
        batch = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        (model(batch) - 1).pow(2).mean().backward()
        optimizer.step()


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([value.detach().reshape(-1).clone() for value in itertools.chain(model.parameters())])
