"""The memory of an optimizer's state, which a restore is to keep.

`Optimizer.load_state_dict` makes new tensors. A CUDA graph that was captured before, and whatever else holds a moment,
would continue with the old ones. So the restored values are copied into these.
"""

from __future__ import annotations

from typing import Any

import torch

from checkpointing.files import sharding


class OptimizerMemory:
    """The tensors that an optimizer has before a restore.

    Args:
        optimizer: The optimizer, as torch's are.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._state = {
            parameter: {key: value for key, value in own.items() if torch.is_tensor(value)}
            for parameter, own in optimizer.state.items()
            if isinstance(own, dict)
        }
        self._options = [
            {key: value for key, value in group.items() if torch.is_tensor(value)} for group in optimizer.param_groups
        ]

    @classmethod
    def of(cls, stateful: Any) -> OptimizerMemory | None:
        """Return the memory of an optimizer, possibly in accelerate's wrapper; None for any other object."""
        optimizer = getattr(stateful, "optimizer", stateful)
        return cls(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None

    def put_back(self) -> list[str]:
        """Copy what was restored into the old tensors, and have the optimizer use these again.

        Returns:
            The names of those that could not be kept.
        """
        replaced = []
        for parameter, before in self._state.items():
            now = self._optimizer.state.get(parameter, {})
            replaced += [key for key, old in before.items() if not _keep(now, key, old)]
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            for key, old in options.items():
                if not _keep(group, key, old) and torch.is_tensor(group.get(key)):
                    # torch moves the state of parameters only.
                    group[key] = group[key].to(old.device)
        return sorted(set(replaced))


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
