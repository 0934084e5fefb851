"""The ways in which ranks hold the state of model and optimizer: one class for each, behind `StateKind`.

A new kind is a new file, and one line in `KINDS`.
"""

from __future__ import annotations

from typing import Any

from checkpointing.process.ranks import Ranks
from checkpointing.state.kinds.pipeline import PipelineState
from checkpointing.state.kinds.sharded import ShardedState
from checkpointing.state.kinds.state_kind import StateKind, WholeState
from checkpointing.state.kinds.zero import ZeroState

# The first that matches; the last matches everything.
KINDS: tuple[type[StateKind], ...] = (PipelineState, ZeroState, ShardedState, WholeState)


def kind_of(model: Any, optimizer: Any, ranks: Ranks | None = None, *, pipeline: bool = False) -> StateKind:
    """Return how this rank holds the state of a training.

    Args:
        model: The model, or a DeepSpeed engine; None where nothing is saved yet.
        optimizer: Its optimizer, without accelerate's wrapper.
        ranks: This rank, with a group that the training thread uses; this process alone by default.
        pipeline: The model is this rank's stage of a pipeline; all ranks call this together.

    Raises:
        CheckpointError: It holds the state in a way that is not supported; the message names it.
    """
    kind = next(kind for kind in KINDS if kind.matches(model, pipeline=pipeline))
    return kind(model, optimizer, ranks or Ranks())
