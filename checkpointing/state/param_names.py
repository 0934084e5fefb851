"""Names of parameters: without those of wrappers, and in an optimizer's state dict, whose order they tell."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from checkpointing.state.held_optimizers import is_of_torch
from checkpointing.state.optimizer_memory import check_kind, check_shapes


def are_named(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether all groups name their parameters, as those of `Optimizer(model.named_parameters())` do."""
    return all("param_names" in group for group in groups)


def unnamed(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group without names."""
    return {key: value for key, value in group.items() if key != "param_names"}


def matched_by_name(
    state: Mapping[str, Any],
    orders: Sequence[Sequence[str]],
    *,
    named: bool = False,
    partial: bool = False,
    frozen: Set[str] = frozenset(),
) -> dict[str, Any]:
    """Return an optimizer's state dict in the order of another optimizer; torch goes by the order alone.

    Args:
        state: The state dict. One without names, or with others, is returned in its own order.
        orders: Names of the other optimizer's parameters, by group.
        named: Whether that one names its parameters.
        partial: Whether it may have fewer.
        frozen: Names of those that it may have besides: nothing is kept of what is not trained.
    """
    groups = state.get("param_groups", [])
    if len(groups) != len(orders) or not are_named(groups):
        return dict(state)
    matched = []
    used = {*state["state"], *(number for group in groups for number in group["params"])}
    unused = itertools.count(1 + max(used, default=-1))
    for group, order in zip(groups, orders, strict=True):
        numbers = dict(zip(group["param_names"], group["params"], strict=True))
        if frozen >= (further := set(order) - numbers.keys()):
            numbers |= {name: next(unused) for name in sorted(further)}
        fits = numbers.keys() >= set(order) if partial else numbers.keys() == set(order)
        params = [numbers[name] for name in order] if fits else group["params"]
        names = {"param_names": list(order) if fits else group["param_names"]} if named else {}
        matched.append({**unnamed(group), **names, "params": params})
    return {**state, "param_groups": matched}


def matched_to(optimizer: Any, model: torch.nn.Module, state: Any) -> Any:
    """Return an optimizer's state dict in the order of `optimizer`, of the whole `model`.

    The names are those that it has for its parameters, or else the model's. A state dict with a layout of its own is
    returned as it is.

    Raises:
        ValueError: It is of another kind of optimizer, or of other parameters.
    """
    if not is_of_torch(state):
        return state
    check_kind(optimizer, state)
    groups = getattr(optimizer, "param_groups", [])
    named, orders = are_named(groups), _orders(optimizer, model)
    frozen = {
        name
        for group, order in zip(groups, orders, strict=True)
        for name, parameter in zip(order, group["params"], strict=True)
        if not parameter.requires_grad
    }
    matched = matched_by_name(state, orders, named=named, frozen=frozen)
    check_shapes(optimizer, matched)
    return matched


def order_digest(optimizer: Any, model: torch.nn.Module) -> str:
    """Return a digest of the names of an optimizer's parameters, by group and in order; empty if it has no groups."""
    orders = _orders(optimizer, model)
    return hashlib.sha256(json.dumps(orders).encode()).hexdigest() if orders else ""


def _orders(optimizer: Any, model: torch.nn.Module) -> list[list[str]]:
    """Return the names of an optimizer's parameters, by group: those that it has for them, or else the model's."""
    groups = getattr(optimizer, "param_groups", [])
    if are_named(groups):
        return [list(group["param_names"]) for group in groups]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names.get(id(parameter), "") for parameter in group["params"]] for group in groups]


def is_wrapped(model: object) -> bool:
    """Return whether a model is in the wrapper of DDP or of torch.compile."""
    return isinstance(model, torch.nn.parallel.DistributedDataParallel) or _is_compiled(model)


def unwrapped(model: Any) -> Any:
    """Return what is in the wrapper of DDP or of torch.compile, which may be another wrapper."""
    return model._orig_mod if _is_compiled(model) else model.module


def innermost(model: Any) -> Any:
    """Return what is in all of these wrappers."""
    while is_wrapped(model):
        model = unwrapped(model)
    return model


def _is_compiled(model: object) -> bool:
    # Nothing is compiled before this is imported, which takes a second.
    module = sys.modules.get("torch._dynamo.eval_frame")
    return module is not None and isinstance(model, module.OptimizedModule)
