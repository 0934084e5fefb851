"""Parameters that are `DTensor`s: FSDP2, HSDP and tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch

from checkpointing.files import sharding
from checkpointing.state.kinds.state_kind import StateKind


class ShardedState(StateKind):
    """Each rank holds the parts that meshes and placements give it; `checkpointing/files/sharding.py` cuts these."""

    is_cut = is_cut_late = True

    @classmethod
    def matches(cls, model: Any, *, pipeline: bool) -> bool:
        """Return whether any parameter is sharded."""
        return isinstance(model, torch.nn.Module) and sharding.has_sharded(model)

    def is_spread(self, local_world_size: int) -> bool:
        """Return whether some node does not hold all of the state, by this rank's own meshes."""
        return sharding.is_spread(self.model, local_world_size)
