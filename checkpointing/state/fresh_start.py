"""What a script has made when it asks where to resume: names, shapes and types of what a checkpoint is loaded into.

A checkpoint that does not fit these is found when it is made, not when a process has died.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from checkpointing.errors import CheckpointError
from checkpointing.files import sharding
from checkpointing.state.samples import listed

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class FreshStart:
    """The beginning of one training, of which no tensor is kept.

    Args:
        model: The model.
        live: What is saved of it, by name.

    Attributes:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module, live: Mapping[str, Any]) -> None:
        self.model = model
        # By name; None where the shape is not known yet, and fits any. What a module makes for its state dict, such as
        # that of a quantised weight, it also knows how to load.
        owned = _owned(model)
        self._shapes = {name: _shape_of(value) for name, value in live.items() if id(value) in owned}
        self._modules = {name for name, _ in model.named_modules()}
        self._dtypes: dict[str, torch.dtype] = {}
        self._groups: list[int] | None = None

    def has_optimizer(self, optimizer: Any) -> None:
        """Note the optimizer's groups, unless that was done."""
        if self._groups is None:
            self._groups = _sizes(getattr(optimizer, "param_groups", ()))

    def begins(self, live: Mapping[str, Any]) -> None:
        """Note the types as training begins: a trainer may have prepared the model since."""
        self._dtypes = {name: live[name].dtype for name in self._shapes.keys() & live.keys()}

    def changed_buffers(self, live: Mapping[str, Any], *, may_change: bool) -> list[str]:
        """Return the buffers that are new, or of another shape or type: a resume puts these in before it loads.

        Args:
            live: What is saved of the model now, by name.
            may_change: Whether a resume can do so.

        Raises:
            CheckpointError: A resume could not load what the model is now.
        """
        changed = [name for name, value in live.items() if self._differs(name, value)]
        gone = self._shapes.keys() - live.keys()
        if not changed and not gone:
            return []
        owned = _owned(self.model)
        changed = [name for name in changed if id(live[name]) in owned]
        fits = {name for name in changed if may_change and self._can_be_put_in(name, live[name])}
        misfits = [f"{name} is {self._what(name, live[name])}" for name in changed if name not in fits]
        misfits += [f"{name} is gone" for name in sorted(gone)]
        if misfits:
            raise CheckpointError(
                f"the model is not what it was when training began: {listed(misfits)}. A script that starts again "
                "makes it as it was then, so no checkpoint could be resumed. Make this change before training begins "
                "(CheckpointManager.resume, Trainer.train), or keep it out of the model and give it in `states`"
            )
        return changed

    def check_groups(self, groups: Any) -> None:
        """Check that an optimizer has the groups that it began with.

        Args:
            groups: As its state dict has them.

        Raises:
            CheckpointError: It has not: a resume would not load them.
        """
        now = _sizes(groups)
        if self._groups is not None and now != self._groups:
            raise CheckpointError(
                f"the optimizer has groups of {now} parameters, and had {self._groups} when training began. A script "
                "that starts again makes it as it was then, so no checkpoint could be resumed. Give it all groups "
                "before training begins (CheckpointManager.resume, Trainer.train), those of later steps with lr=0"
            )

    def _differs(self, name: str, value: Any) -> bool:
        if name not in self._shapes:
            return True
        before, now = self._shapes[name], _shape_of(value)
        is_other = before is not None and now is not None and before != now
        return is_other or self._dtypes.get(name, value.dtype) != value.dtype

    def _can_be_put_in(self, name: str, value: torch.Tensor) -> bool:
        is_buffer = type(value) in _PLAIN and not isinstance(value, torch.nn.Parameter)
        return is_buffer and name.rpartition(".")[0] in self._modules

    def _what(self, name: str, value: torch.Tensor) -> str:
        if name not in self._shapes:
            return "new"
        before, now = self._shapes[name], _shape_of(value)
        if before is not None and now is not None and before != now:
            return f"of shape {now}, not {before}"
        return f"of {value.dtype}, not {self._dtypes.get(name)}"


def _owned(model: torch.nn.Module) -> set[int]:
    return {id(value) for value in (*model.parameters(), *model.buffers())}


def _shape_of(value: Any) -> tuple[int, ...] | None:
    # Quantised parameters have other shapes once they are on their device.
    is_known = not is_lazy(value) and (type(value) in _PLAIN or sharding.is_sharded(value))
    return sharding.shape_of(value) if is_known else None


def _sizes(groups: Any) -> list[int]:
    return [len(group["params"]) for group in groups]
