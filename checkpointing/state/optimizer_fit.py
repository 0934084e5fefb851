"""Whether an optimizer's state is of the optimizer that is to load it: torch asks only for the number of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from checkpointing.files import sharding

# Options by which optimizers differ in what they keep. All others have values of their own where a state lacks them.
_DECISIVE = {"betas", "momentum", "centered", "rho", "lr_decay", "beta2_decay"}
# What torch's own optimizers keep for each element of a parameter.
_OF_EACH_ELEMENT = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum"}


def check_kind(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Check that an optimizer finds the options in a state that it reads.

    Args:
        optimizer: The optimizer.
        state: A state dict.

    Raises:
        ValueError: It is of another kind of optimizer.
    """
    # A user's own optimizer need not have groups.
    for own, group in zip(getattr(optimizer, "param_groups", ()), state.get("param_groups", ()), strict=False):
        # A group of which nothing is trained may have no options.
        if group.get("params") and (lacking := sorted(_DECISIVE & own.keys() - group.keys())):
            raise ValueError(f"it is of another kind of optimizer, without {' and '.join(lacking)}")


def check_shapes(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Check the shapes of what an optimizer of torch keeps for each element.

    Args:
        optimizer: The optimizer; one that is not torch's may keep anything under these names.
        state: A state dict of as many parameters, in the same order.

    Raises:
        ValueError: It is of other parameters, or of the same in another order.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for place, (number, parameter) in enumerate(zip(numbers, parameters, strict=False)):
        for name in sorted(_OF_EACH_ELEMENT & state["state"].get(number, {}).keys()):
            value, shape = state["state"][number][name], sharding.shape_of(parameter)
            if isinstance(value, torch.Tensor) and tuple(value.shape) != shape:
                raise ValueError(
                    f"parameter {place} has the shape {shape}, its {name} {tuple(value.shape)}: the parameters are "
                    "others, or in another order"
                )
