"""The memory of an optimizer's state, which a restore is to keep.

`Optimizer.load_state_dict` makes new tensors. A CUDA graph that was captured before, and whatever else holds a moment,
would continue with the old ones. So the restored values are copied into these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from checkpointing.files import sharding


class OptimizerMemory:
    """The tensors and containers that optimizers have before a restore.

    Args:
        optimizers: An optimizer, as torch's are, and those that it holds, which may share containers.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._parts = [_Part(one) for one in optimizers if isinstance(one, torch.optim.Optimizer)]

    def put_back(self) -> list[str]:
        """Copy what was restored into the old tensors and containers, and have the optimizers use these again.

        Returns:
            The names of tensors that could not be kept.
        """
        return sorted({name for part in self._parts for name in part.put_back()})


class _Part:
    """What one optimizer has."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state, self._groups = optimizer.state, optimizer.param_groups
        self._tensors = {
            parameter: {key: value for key, value in own.items() if torch.is_tensor(value)}
            for parameter, own in optimizer.state.items()
            if isinstance(own, dict)
        }
        self._options = [
            {key: value for key, value in group.items() if torch.is_tensor(value)} for group in optimizer.param_groups
        ]

    def put_back(self) -> list[str]:
        replaced = []
        for parameter, before in self._tensors.items():
            now = self._optimizer.state.get(parameter, {})
            replaced += [key for key, old in before.items() if not _keep(now, key, old)]
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            for key, old in options.items():
                if not _keep(group, key, old) and torch.is_tensor(group.get(key)):
                    # torch moves the state of parameters only.
                    group[key] = group[key].to(old.device)
        self._keep_containers()
        return replaced

    def _keep_containers(self) -> None:
        """Have another optimizer around this one, which shares the containers, see what was restored."""
        own = vars(self._optimizer)
        if own.get("state", self._state) is not self._state:
            restored = dict(own["state"])
            self._state.clear()
            self._state.update(restored)
            own["state"] = self._state
        if own.get("param_groups", self._groups) is not self._groups:
            for old, new in zip(self._groups, list(own["param_groups"]), strict=True):
                if old is not new:
                    options = dict(new)
                    old.clear()
                    old.update(options)
            own["param_groups"] = self._groups


def _keep(holder: dict[str, Any], key: str, old: torch.Tensor) -> bool:
    """Put an old tensor in the place of a new one, with its values; return whether they fit."""
    new = holder.get(key)
    if new is old:
        return True
    if not torch.is_tensor(new) or (new.shape, new.dtype) != (old.shape, old.dtype):
        return False
    source, target = new, old
    if sharding.is_dtensor(old) or sharding.is_dtensor(new):
        if not (sharding.is_dtensor(old) and sharding.is_dtensor(new)) or old.placements != new.placements:  # type: ignore[attr-defined]
            return False
        source, target = new._local_tensor, old._local_tensor  # type: ignore[attr-defined]
    with torch.no_grad():
        target.copy_(source)
    holder[key] = old
    return True


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
