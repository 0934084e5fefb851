"""Pipeline parallelism: each rank holds other layers, and all ranks together write one checkpoint of the whole model.

Names are those of the whole model on every rank, so the files are those of a training without a pipeline, whose
optimizer has named its parameters: a checkpoint resumes on any number of stages, or on none.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checkpointing.errors import CheckpointError
from checkpointing.files import sharding
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.files.sharding import Fragment
from checkpointing.files.torch_files import torch_bytes
from checkpointing.format.layout import OPTIONS_NAME
from checkpointing.process.ranks import Ranks
from checkpointing.state.kinds.state_kind import StateKind
from checkpointing.state.kinds.zero import is_engine
from checkpointing.state.param_names import are_named, unnamed
from checkpointing.state.weights import load_parts

logger = logging.getLogger("checkpointing")

_MAX_NAMES = 3
# Optimizer state that has the shape of its parameter.
_MOMENTS = {"exp_avg", "exp_avg_sq", "momentum_buffer"}
# Of a layer, in the name of a parameter: model.layers.12.mlp.up_proj.weight
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class _Kind:
    """What a tensor is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Any) -> _Kind:
        return cls(sharding.shape_of(value), value.dtype)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def absent(self) -> Fragment:
        """Return what a rank has of such a tensor that does not hold it."""
        return Fragment(self.shape, 0, torch.empty(0, dtype=self.dtype), distribution="another stage")


class PipelineState(StateKind):
    """Each rank holds the stages of a pipeline that are its own; all ranks make this together.

    Args:
        model: This rank's stage.
        optimizer: Its optimizer.
        ranks: This rank, with a group that the training thread uses.

    Raises:
        CheckpointError: The stages do not belong together, or are sharded.
    """

    is_cut = is_kept = has_own_buffers = True

    def __init__(self, model: Any, optimizer: Any, ranks: Ranks) -> None:
        super().__init__(model, optimizer, ranks)
        if is_engine(model) or not isinstance(model, torch.nn.Module):
            # On all ranks: none waits for another.
            raise CheckpointError(f"pipeline: model is a {type(model).__name__}; give the module of this rank's stage")
        state = {name: value for name, value in model.state_dict(keep_vars=True).items() if torch.is_tensor(value)}
        names = {id(value): name for name, value in model.named_parameters()}
        error = _unsupported(state, optimizer, names)
        tensors = {name: _Kind.of(value) for name, value in state.items()}
        groups = [] if error else [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._everyone: list[Any] = ranks.gather((tensors, groups, error))
        # All ranks come to the same result: none waits for another.
        error = next((error for _, _, error in self._everyone if error), "") or self._mismatch()
        if error:
            raise CheckpointError(f"pipeline: {error}")
        self._kinds: dict[str, _Kind] = {name: kind for own, _, _ in self._everyone for name, kind in own.items()}
        self._own, self._groups = tensors.keys(), groups
        self._is_named = are_named(getattr(optimizer, "param_groups", []))
        self._holders: dict[str, list[int]] = {
            name: [rank for rank, (theirs, _, _) in enumerate(self._everyone) if name in theirs] for name in tensors
        }
        # As in an optimizer of the whole model: by group, and then from stage to stage.
        try:
            order = [
                in_order_of_layers([theirs[number] for _, theirs, _ in self._everyone]) for number in range(len(groups))
            ]
        except ValueError as wrong:
            raise CheckpointError(f"pipeline: {wrong}") from None
        numbers = itertools.count()
        self._numbers: list[dict[str, int]] = [{name: next(numbers) for name in group} for group in order]

    def _mismatch(self) -> str:
        """Return why the stages do not belong together; empty if they do."""
        if len({len(groups) for _, groups, _ in self._everyone}) > 1:
            return "the optimizers of the stages have different numbers of groups"
        found: dict[str, _Kind] = {}
        for tensors, _, _ in self._everyone:
            for name, kind in tensors.items():
                if found.setdefault(name, kind) != kind:
                    return (
                        f"{name} is of shape {found[name].shape} in one stage and {kind.shape} in another: give the "
                        "layers of each stage the names that they have in the whole model"
                    )
        return ""

    @classmethod
    def matches(cls, model: Any, *, pipeline: bool) -> bool:
        """Return what the caller says: a stage is a module like any other."""
        return pipeline

    def expected_bytes(self, saved: list[torch.Tensor] | None, local_world_size: int, node_share: float) -> int:
        """Estimate the size of a node's snapshot as if all stages were like this rank's."""
        own = sum(self._kinds[name].nbytes for name in self._own)
        all_stages = sum(kind.nbytes for kind in self._kinds.values())
        return int(super().expected_bytes(saved, local_world_size, 1) * node_share * all_stages / max(own, 1))

    def is_spread(self, local_world_size: int) -> bool:
        """Return whether some node does not hold all stages."""
        nodes = [
            self._everyone[first : first + local_world_size] for first in range(0, self._world_size, local_world_size)
        ]
        return any(set().union(*(tensors for tensors, _, _ in node)) != self._kinds.keys() for node in nodes)

    def weights(self, live: Mapping[str, torch.Tensor], local_world_size: int) -> dict[str, Fragment]:
        """Return this rank's weights as fragments, of which one rank of each node writes each."""
        return {name: self._fragment(name, value, local_world_size) for name, value in live.items()}

    def optimizer_state(self, state: Mapping[str, Any], local_world_size: int) -> dict[str, Any]:
        """Return an optimizer's state dict, with fragments, and with the numbers that the whole model's would have."""
        numbered: dict[int, Any] = {}
        groups = []
        for group, names, numbers in zip(state["param_groups"], self._groups, self._numbers, strict=True):
            groups.append(_numbered(group, numbers, named=True))
            for own, name in zip(group["params"], names, strict=True):
                if own in state["state"]:
                    numbered[numbers[name]] = {
                        key: self._fragment(name, value, local_world_size) if torch.is_tensor(value) else value
                        for key, value in state["state"][own].items()
                    }
        return {**state, "state": numbered, "param_groups": groups}

    def own_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a whole model's optimizer state, with the numbers of its own optimizer.

        Raises:
            ValueError: It is that of another model.
        """
        sizes = [len(group["params"]) for group in state["param_groups"]]
        if sizes != list(map(len, self._numbers)):
            raise ValueError(f"it has groups of {sizes} parameters, the stages {list(map(len, self._numbers))}")
        counter, found, groups = itertools.count(), dict[int, Any](), []
        for group, names, numbers in zip(state["param_groups"], self._groups, self._numbers, strict=True):
            # Of a training without a pipeline, numbers are in the same order, but need not begin with 0.
            theirs = dict(zip(group.get("param_names", numbers), group["params"], strict=True))
            if theirs.keys().isdisjoint(numbers):
                # By the names that a wrapper gave its parameters.
                theirs = dict(zip(numbers, group["params"], strict=True))
            if theirs.keys() != numbers.keys():
                raise ValueError(f"it lacks {_some(numbers.keys() - theirs.keys())}")
            own = {name: next(counter) for name in names}
            groups.append(_numbered(group, own, named=self._is_named))
            for name in names:
                self._check_moments(name, state["state"].get(theirs[name], {}))
            found |= {own[name]: state["state"][theirs[name]] for name in names if theirs[name] in state["state"]}
        return {**state, "state": found, "param_groups": groups}

    def files(self, state: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the options of this stage's groups, which the optimizer's file has of one stage only."""
        options = [
            {key: value for key, value in unnamed(group).items() if key != "params"} for group in state["param_groups"]
        ]
        return {OPTIONS_NAME: torch_bytes(options)}

    def load_weights(self, point: LoadedCheckpoint, place: Callable[[Any], Any]) -> Mapping[str, torch.Tensor]:
        """Copy the weights of this rank's stages into the model; return them."""
        return load_parts(self.model, point, is_part=True)

    def restore_options(self, point: LoadedCheckpoint) -> bool:
        """Restore the options of this stage's groups, where the stages' differ.

        Returns:
            Whether the checkpoint was written by as many ranks.
        """
        own = point.own_name(OPTIONS_NAME)
        if point.world_size != self._world_size:
            if own != OPTIONS_NAME:
                logger.warning(
                    "%s has other options for the optimizer of each stage, of %d ranks: this rank of %d continues with "
                    "those of rank 0",
                    point.label,
                    point.world_size,
                    self._world_size,
                )
            return False
        if own != OPTIONS_NAME:
            for group, options in zip(self.optimizer.param_groups, point.torch_object(own), strict=True):
                group.update(options)
        return True

    def _check_moments(self, name: str, values: Mapping[str, Any]) -> None:
        """Check that the moments of a parameter have its shape.

        Raises:
            ValueError: They are those of another one.
        """
        for key in _MOMENTS & values.keys():
            shape = sharding.shape_of(values[key])
            if shape != self._kinds[name].shape:
                raise ValueError(f"{key} of {name} is of shape {shape}, the parameter of {self._kinds[name].shape}")

    def complete(
        self, model: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any], parts: sharding.Parts, ranks: Ranks
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the state dicts of all stages, with stand-ins for what other ranks hold; called by all ranks."""
        own = {number: _structure(value) for number, value in optimizer["state"].items()}
        everything: dict[int, Any] = {}
        for theirs in ranks.gather(own):
            everything |= {number: value for number, value in theirs.items() if number not in everything}
        state = {
            number: optimizer["state"].get(number) or _absent(everything[number], parts)
            for number in sorted(everything)
        }
        weights = {
            name: model[name] if name in model else sharding.stand_ins(kind.absent(), parts)
            for name, kind in self._kinds.items()
        }
        return weights, {**optimizer, "state": state}

    def _fragment(self, name: str, value: torch.Tensor, local_world_size: int) -> Fragment:
        node = self._rank // local_world_size
        holders = self._holders[name]
        writer = next(rank for rank in holders if rank // local_world_size == node)
        own = value.detach().reshape(-1)
        return Fragment(tuple(value.shape), 0, own, writer == self._rank, f"a stage of ranks {holders}")


def in_order_of_layers(of_ranks: Sequence[Sequence[str]]) -> list[str]:
    """Return the names of all ranks in the order of the whole model.

    A rank may have several stages (interleaved and V-shaped schedules), and a model several stacks of layers, such as
    an encoder and a decoder, each of which has numbers of its own. A stage ends where the number in the names, that of
    the layer, goes back or leaves one out, and with its stack. Names without a number belong to the layer before them,
    or to the first one after them: embeddings, norms and heads.

    Args:
        of_ranks: The names of each rank, in the order of its own layers.

    Raises:
        ValueError: Ranks have the stacks in different orders.
    """
    stages: list[tuple[str | None, float, int, list[str]]] = []
    # Lists, since all ranks are to come to the same order.
    follows: dict[str, list[str]] = {}
    for rank, names in enumerate(of_ranks):
        # A rank without layers has what comes before all of them, or after.
        stack, last, begin, own = None, -1, math.inf if rank else -1.0, list[str]()
        for name in names:
            found = _NUMBER.search(name)
            if found is not None:
                before, layer = name[: found.start()], int(found.group())
                follows.setdefault(before, [])
                if stack is None:
                    stack, begin = before, layer
                elif stack != before or layer not in (last, last + 1):
                    stages.append((stack, begin, rank, own))
                    if stack != before:
                        follows[before].append(stack)
                    stack, begin, own = before, layer, []
                last = layer
            own.append(name)
        stages.append((stack, begin, rank, own))
    stacks: list[str] = []
    while len(stacks) < len(follows):
        # In the order in which they were found, from the first rank to the last, unless a rank has it otherwise.
        left = [stack for stack in follows if stack not in stacks]
        following = next((stack for stack in left if all(before in stacks for before in follows[stack])), None)
        if following is None:
            raise ValueError(f"the ranks have these layers in different orders: {', '.join(sorted(left))}")
        stacks.append(following)

    def place(stage: tuple[str | None, float, int, list[str]]) -> tuple[float, float, int]:
        stack, begin, rank, _ = stage
        return begin if stack is None else stacks.index(stack), begin, rank

    stages.sort(key=place)
    return list(dict.fromkeys(itertools.chain.from_iterable(own for *_, own in stages)))


def _unsupported(state: Mapping[str, Any], optimizer: Any, names: Mapping[int, str]) -> str:
    """Return why a stage cannot be saved; empty if it can."""
    if sharded := [name for name, value in state.items() if sharding.is_sharded(value)]:
        return f"stages that are sharded are not supported yet ({_some(sharded)})"
    if apart := [name for name, value in state.items() if not value.is_contiguous()]:
        return f"weights that are not contiguous are not supported ({_some(apart)})"
    if not isinstance(optimizer, torch.optim.Optimizer):
        return f"the optimizer is a {type(optimizer).__name__}; use one of torch.optim"
    if any(id(parameter) not in names for group in optimizer.param_groups for parameter in group["params"]):
        return "the optimizer has parameters that are not of this rank's stage"
    return ""


def _some(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:_MAX_NAMES]) + (", …" if len(found) > _MAX_NAMES else "")


def _numbered(group: Mapping[str, Any], numbers: Mapping[str, int], *, named: bool) -> dict[str, Any]:
    names = {"param_names": list(numbers)} if named else {}
    return {**unnamed(group), **names, "params": list(numbers.values())}


def _structure(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _Kind.of(value) if torch.is_tensor(value) else value for key, value in values.items()}


def _absent(structure: Mapping[str, Any], parts: sharding.Parts) -> dict[str, Any]:
    values = {key: value.absent() if isinstance(value, _Kind) else value for key, value in structure.items()}
    found: dict[str, Any] = sharding.stand_ins(values, parts)
    return found
