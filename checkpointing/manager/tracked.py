"""What is saved and restored: the model and all that belongs to its training."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch

from checkpointing.manager.registered_objects import RegisteredObjects
from checkpointing.process.ranks import Ranks
from checkpointing.state.adapter import Adapter
from checkpointing.state.ddp_buckets import DdpBuckets
from checkpointing.state.fresh_start import FreshStart
from checkpointing.state.held_optimizers import inner_optimizer
from checkpointing.state.kinds import kind_of
from checkpointing.state.kinds.state_kind import StateKind
from checkpointing.state.param_names import is_wrapped, unwrapped
from checkpointing.state.several_schedulers import as_one
from checkpointing.state.train_state import TrainState, hooks_with_memory

logger = logging.getLogger("checkpointing")


class Tracked:
    """What a manager tracks.

    Args:
        ranks: This rank.

    Attributes:
        state: Of the training.
        buckets: The order in which DDP sums gradients.
        static_files: Configuration and tokenizer, by file name: part of every checkpoint.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.state: TrainState
        self.buckets = DdpBuckets(is_first=ranks.is_first)
        self.static_files: dict[str, bytes] = {}
        self._kept: StateKind | None = None
        self._fresh: FreshStart | None = None
        # Once training is about to begin.
        self._registered: RegisteredObjects | None = None
        # Classes of what DDP's communication hooks remember, which no checkpoint holds.
        self._hook_states: list[str] = []

    def track(
        self,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        scaler: Any,
        states: Mapping[str, Any],
        adapter: Adapter | None,
        *,
        pipeline: bool,
    ) -> None:
        """Set it; see `CheckpointManager.track`."""
        while is_wrapped(model):
            if isinstance(model, torch.nn.parallel.DistributedDataParallel):
                self._hook_states = hooks_with_memory(model)
            model = unwrapped(model)
        kept = self._kept
        if pipeline or kept is None or not kept.is_of(model, optimizer):
            found = kind_of(model, inner_optimizer(optimizer), self._ranks, pipeline=pipeline)
            kept = self._kept = found if found.is_kept else None
        if kept is not None and kept.optimizer is kept:
            # It takes the optimizer's place.
            model, optimizer = kept.model, kept
        fresh = self._fresh if self._fresh is not None and self._fresh.model is model else None
        self.state = TrainState(model, optimizer, as_one(scheduler), scaler, dict(states), adapter, kept, fresh)
        self._add_registered()
        self.buckets.track([model, optimizer, *self.state.states.values()])

    def remember_start(self) -> FreshStart | None:
        """Note what the script has made, before anything of it is restored or trained; once for a model."""
        state = self.state
        if state.model is None:
            return None
        fresh = state.fresh
        if fresh is None:
            fresh = self._fresh = FreshStart(state.model, state.weights())
            self.state = dataclasses.replace(state, fresh=fresh)
        if state.optimizer is not None:
            fresh.has_optimizer(state.torch_optimizer)
            if self._registered is None:
                self._registered = RegisteredObjects(state.optimizer)
                self._add_registered()
        return fresh

    def check_registered(self) -> None:
        """Check that nothing was registered with accelerate since training began (CheckpointError)."""
        if self._registered is not None:
            self._registered.check()

    def _add_registered(self) -> None:
        if self._registered is None:
            return
        state = self.state
        saved = (state.model, state.optimizer, state.scheduler, state.scaler, *state.states.values())
        if found := self._registered.states(saved):
            self.state = dataclasses.replace(state, states={**state.states, **found})

    @property
    def has_training(self) -> bool:
        """Whether there is something to save."""
        return self.state.model is not None and self.state.optimizer is not None

    @property
    def is_on_device(self) -> bool:
        """Whether the model is on an accelerator."""
        return self.state.model is not None and self.state.on_gpu

    def check(self) -> None:
        """Check that it can be saved, and warn once of what no checkpoint will hold.

        Raises:
            CheckpointError: Something in `states` is sharded.
        """
        if self._ranks.is_first and self._hook_states and not self.state.states:
            logger.warning(
                "the state of DDP's communication hook (%s) is in no checkpoint: a resumed run begins with an empty "
                "one. Give it in `states` as an object with state_dict and load_state_dict",
                ", ".join(self._hook_states),
            )
        if not self.has_training:
            return
        self.state.check()
        if (fresh := self.remember_start()) is not None:
            fresh.begins(self.state.weights())
        if self.state.adapter is not None:
            self.state.adapter.begin(self.state.model)
