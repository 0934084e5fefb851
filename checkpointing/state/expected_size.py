"""The size of a snapshot, before there is one."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from checkpointing.files import sharding
from checkpointing.process.trees import tensors_in
from checkpointing.state.train_state import TrainState


def expected_bytes(train_state: TrainState, local_world_size: int = sys.maxsize, *, is_spread: bool = False) -> int:
    """Estimate the size of a node's snapshot, as far as it can be known before the first optimizer step.

    Args:
        train_state: What is saved.
        local_world_size: Number of ranks on each node.
        is_spread: Whether some node does not hold all of the model.
    """
    share = local_world_size / dist.get_world_size() if is_spread else 1
    if train_state.zero is not None and train_state.adapter is None:
        return int(train_state.zero.nbytes * share)

    def nbytes(tensor: Any) -> int:
        own = is_spread and sharding.is_sharded(tensor)
        return sharding.own_nbytes(tensor) * local_world_size if own else sharding.nbytes_of(tensor)

    parameters = list(train_state.model.parameters())
    saved = train_state.adapter.weights(train_state.model).values() if train_state.adapter else None
    model = sum(nbytes(value) for value in (saved or [*parameters, *train_state.model.buffers()]))
    optimizer = train_state.torch_optimizer
    tensors = tensors_in(optimizer.state_dict())
    state = sum({id(t) if sharding.is_sharded(t) else t.data_ptr(): nbytes(t) for t in tensors}.values())
    if not state:
        defaults = getattr(optimizer, "defaults", {})
        moments = 2 + bool(defaults.get("amsgrad")) if "betas" in defaults else int(bool(defaults.get("momentum")))
        state = moments * sum(nbytes(value) for value in parameters if value.requires_grad)
    if train_state.stages is not None:
        return int((model + state) * share * train_state.stages.nbytes / max(train_state.stages.own_nbytes, 1))
    return int(model + state)
