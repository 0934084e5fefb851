"""The state of one step, by reference, as it is handed from the training thread to the copy thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from checkpointing.files import sharding
from checkpointing.process.ranks import Ranks
from checkpointing.process.trees import tensors_in
from checkpointing.state.kinds.state_kind import StateKind


def versions_of(tensors: Iterable[Any]) -> list[tuple[torch.Tensor, int]]:
    """Return the version counters of tensors, and of what this rank holds of those that are distributed."""
    found = list(tensors)
    found += [tensor._local_tensor for tensor in found if sharding.is_dtensor(tensor)]
    return [(tensor, tensor._version) for tensor in found]


@dataclass(frozen=True)
class CapturedState:
    """The state of one step, by reference: valid until an optimizer steps.

    Attributes:
        weights_name: The file that the model is saved in.
        kind: How ranks hold model and optimizer.
        model: State dict of what is saved; buffers are clones.
        parameters: Names of the parameters in `model`.
        buffers: Names of the buffers in `model`.
        optimizer: The optimizer's state dict, in containers of its own.
        states: State dicts of the further objects, by name, in containers of their own.
        small: Scheduler, scaler and other small files, by file name.
        parts: What this rank holds of sharded tensors; the state dicts have only stand-ins for these.
        is_spread: No node holds all of the model.
        versions: Version counter of every tensor that only an optimizer may change.
        masters: Parameters in full precision, by name, where the optimizer has these besides.
        own_buffers: Copies of buffers that other ranks may lack, by name, unless they are large.
        finite: Names of the buffers that are to be finite, of those that are clones.
        scale: The gradient scaler's scale; None without one.
        sources: Tensors that only an optimizer may change, as training has them, with their names.
        uncut: Where `parts` are yet to be made: number of ranks on each node that copy what is sharded together.
    """

    weights_name: str
    kind: StateKind
    model: dict[str, torch.Tensor]
    parameters: frozenset[str]
    buffers: frozenset[str]
    optimizer: Any
    states: dict[str, Any]
    small: dict[str, bytes]
    parts: sharding.Parts
    is_spread: bool
    versions: list[tuple[torch.Tensor, int]]
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    own_buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    finite: frozenset[str] = frozenset()
    scale: float | None = None
    sources: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    uncut: int | None = None

    def cut(self) -> CapturedState:
        """Return the state with stand-ins for sharded tensors, and this rank's parts of them.

        Apart from `capture`, since it takes longer: training continues meanwhile.
        """
        if self.uncut is None:
            return self
        parts: sharding.Parts = {}
        whole, optimizer = (sharding.stand_ins(state, parts, self.uncut) for state in (self.model, self.optimizer))
        model = {name: value.detach() for name, value in whole.items()}
        known = {id(tensor) for tensor, _ in self.versions}
        # Memory that has been replaced since is not that of the captured step.
        others = [(tensor, -1) for part in parts.values() for tensor in part.guards if id(tensor) not in known]
        return dataclasses.replace(
            self, model=model, optimizer=optimizer, parts=parts, versions=[*self.versions, *others], uncut=None
        )

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors of the state, on any device."""
        yield from (tensor for tensor, _ in self.versions)
        for state in self.states.values():
            yield from tensors_in(state)

    def changed(self) -> int:
        """Count the tensors that were changed in place since, other than by an optimizer that passed the barrier."""
        return sum(tensor._version != version for tensor, version in self.versions)


def completed(state: CapturedState, ranks: Ranks) -> CapturedState:
    """Return a captured state that is cut, with stand-ins for what only other ranks have; called by all ranks.

    Args:
        state: The state.
        ranks: This rank, with a group that only the copy thread uses.
    """
    state = state.cut()
    model, optimizer = state.kind.complete(state.model, state.optimizer, state.parts, ranks)
    return dataclasses.replace(state, model=model, optimizer=optimizer)
