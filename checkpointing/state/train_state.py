"""What a run saves and restores: model, optimizer, scheduler, scaler, and further objects of the user's."""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.errors import CheckpointError
from checkpointing.files import sharding
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.files.torch_files import check_readable, torch_bytes
from checkpointing.format.layout import (
    ADAPTER_NAME,
    BUFFERS_NAME,
    EXTRA_STATE_NAME,
    MASTER_NAME,
    MODEL_NAME,
    OPTIMIZER_NAME,
    ORDER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    rank_state_name,
)
from checkpointing.host.environment import ALLOW_CHANGES_ENV, rank_settings
from checkpointing.process.trees import freeze, kinds_in, tensors_in
from checkpointing.state.adapter import BASE_NAME, BASE_STATE, Adapter
from checkpointing.state.captured_state import CapturedState, versions_of
from checkpointing.state.fresh_start import FreshStart
from checkpointing.state.held_optimizers import (
    announces_steps,
    check_resumable,
    held_by,
    inner_optimizer,
    is_of_torch,
)
from checkpointing.state.kinds import kind_of
from checkpointing.state.kinds.state_kind import StateKind
from checkpointing.state.optimizer_memory import OptimizerMemory
from checkpointing.state.param_names import order_digest
from checkpointing.state.samples import named_tensors
from checkpointing.state.tensor_fingerprint import FiniteLook
from checkpointing.state.trained_elsewhere import TRAINED_STATE, TrainedElsewhere
from checkpointing.state.weights import is_expanded

logger = logging.getLogger("checkpointing")

# Names of files that are not those of further `states`.
_RESERVED = {"optimizer", "scheduler", "scaler", "rng_state", BASE_STATE, TRAINED_STATE}
# Larger buffers are not cloned for every snapshot; their version counters guard them instead.
_CLONE_BYTES = 64 * 1024 * 1024
_SMALL_TENSOR_BYTES = 64 * 1024


def _clones_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of tensors; shared ones stay shared."""
    clones: dict[int, torch.Tensor] = {}
    return {name: clones.setdefault(id(value), value.detach().clone()) for name, value in tensors.items()}


@dataclass(frozen=True)
class TrainState:
    """The objects that hold a training's state; see `CheckpointManager.track`.

    Attributes:
        model: The model, without a DDP wrapper.
        optimizer: The optimizer, possibly in accelerate's wrapper.
        scheduler: The learning rate scheduler.
        scaler: The gradient scaler.
        states: Further objects with `state_dict` and `load_state_dict`, by name.
        adapter: The part of the model that is saved; None saves all of it.
        held_as: How ranks hold model and optimizer, where that is of a kind that stays.
        fresh: What a fresh start of the script has, once that is known.
    """

    model: torch.nn.Module
    optimizer: Any
    scheduler: Any = None
    scaler: Any = None
    states: Mapping[str, Any] = field(default_factory=dict)
    adapter: Adapter | None = None
    held_as: StateKind | None = None
    fresh: FreshStart | None = None
    _finite_buffers: frozenset[str] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        check_model(self.model)
        check_optimizer(self.torch_optimizer)
        for name in self.states:
            if not name.isidentifier() or name in _RESERVED:
                raise ValueError(f"states: the name {name!r} is not allowed; use another identifier")
        # Masks hold infinities from the beginning; other buffers are to stay finite.
        buffers = _small_buffers(self.model) if self.model is not None else {}
        object.__setattr__(self, "_finite_buffers", frozenset(buffers.keys() - set(FiniteLook(buffers).names())))

    @property
    def weights_name(self) -> str:
        """The file that the model's weights are saved in."""
        return MODEL_NAME if self.adapter is None else ADAPTER_NAME

    @property
    def torch_optimizer(self) -> Any:
        """The optimizer inside a wrapper that only passes on, such as accelerate's."""
        return inner_optimizer(self.optimizer)

    @property
    def on_gpu(self) -> bool:
        """Whether the model is on an accelerator."""
        return self.device_index is not None

    @property
    def device_index(self) -> int | None:
        """Number of the accelerator that the model, or its first parameter, is on; None where it is on none."""
        first = next(self.model.parameters(), None)
        if first is None or first.device.type in ("cpu", "meta"):
            return None
        return first.device.index or 0

    @property
    def kind(self) -> StateKind:
        """How ranks hold model and optimizer; `fully_shard` may change it until training begins."""
        return self.held_as or kind_of(self.model, self.torch_optimizer)

    @property
    def has_step_hook(self) -> bool:
        """Whether torch calls the pre-step barrier before the optimizer changes the state."""
        # Asked at each snapshot: only a kind that stays has another optimizer inside, and need not be found again.
        stepping = self.torch_optimizer if self.held_as is None else self.held_as.base_optimizer
        return announces_steps(stepping)

    def expected_bytes(self, local_world_size: int = sys.maxsize, *, is_spread: bool = False) -> int:
        """Estimate the size of a node's snapshot, as far as it can be known before the first optimizer step.

        Args:
            local_world_size: Number of ranks on each node.
            is_spread: Whether some node does not hold all of the model.
        """
        saved = list(self.adapter.weights(self.model).values()) if self.adapter is not None else None
        node_share = local_world_size / dist.get_world_size() if is_spread else 1
        return self.kind.expected_bytes(saved, local_world_size, node_share)

    def capture(
        self,
        *,
        readable: set[object] | None = None,
        local_world_size: int = sys.maxsize,
        is_spread: bool | None = None,
    ) -> CapturedState:
        """Capture the state in the training thread, quickly: references to large state, copies of small.

        Args:
            readable: Kinds of values that can be read back, as far as is known; empty before the first time. Where
                there are others, everything but the weights is checked, and they are added. None checks nothing.
            local_world_size: Number of ranks on each node, which together copy what is sharded.
            is_spread: Whether some node does not hold all of the model, as all ranks have agreed; None goes by what
                this rank knows.

        Raises:
            CheckpointError: Part of the state cannot be read back; the message names it.
        """
        kind = self.kind
        is_first = readable == set()
        if is_first and self.held_as is None:
            # Before anything is taken by reference: the optimizer loads what it has saved.
            check_resumable(self.torch_optimizer, self.states.values())
        live, objects, small = self._live_state()
        small |= self._changes(live, kind)
        small |= {name: torch_bytes(value) for name, value in objects.items()}
        parts: sharding.Parts = {}
        is_spread = kind.is_spread(local_world_size) if is_spread is None else is_spread
        if is_spread:
            # Of all ranks that hold the same, one writes it.
            local_world_size = sys.maxsize
        # Only an optimizer changes parameters; everything else may change at any moment.
        buffers = {name: value for name, value in live.items() if not isinstance(value, torch.nn.Parameter)}
        are_cloned = sum(value.nbytes for value in buffers.values()) <= _CLONE_BYTES
        if are_cloned:
            live |= _clones_of(buffers)
        is_late = kind.is_cut_late and not is_first
        own_buffers = {name: live[name] for name in buffers if kind.has_own_buffers and are_cloned}
        live = dict(kind.weights(live, local_world_size))
        if kind.is_cut and not is_late:
            live = sharding.stand_ins(live, parts, local_world_size)
        # Detached at once, so that nobody can put other memory in its place.
        model = {name: value if sharding.is_sharded(value) else value.detach() for name, value in live.items()}
        optimizer = freeze(self.optimizer.state_dict())
        masters = sharding.stand_ins(kind.masters, parts)
        states = {name: freeze(stateful.state_dict()) for name, stateful in self.states.items()}
        states |= self._own_states(states, live.values(), kind)
        held = set(map(id, tensors_in(optimizer)))
        if self.on_gpu:
            # The host does not wait at the barrier, so what the optimizer changes on the host is copied now.
            optimizer = _clone_small_cpu_tensors(optimizer)
        small |= self._optimizer_files(optimizer, kind)
        optimizer = kind.optimizer_state(optimizer, local_world_size)
        if kind.is_cut and not is_late:
            optimizer = sharding.stand_ins(optimizer, parts, local_world_size)
        if readable is not None:
            named = {f"{name}.pt": value for name, value in states.items()}
            # What is yet to be cut was seen cut at the first time.
            late = {OPTIMIZER_NAME} if is_late else set()
            _check_new_kinds({**objects, OPTIMIZER_NAME: optimizer, **named}, readable, late)
        guards = [tensor for part in parts.values() for tensor in part.guards]
        sources = [
            *named_tensors({name: value for name, value in live.items() if name not in buffers}, "model"),
            # Copies are nobody's to write to, and others each time.
            *((name, one) for name, one in named_tensors(optimizer, "optimizer") if id(one) in held or kind.is_cut),
            *(("a shard", tensor) for tensor in guards if not sharding.is_dtensor(tensor)),
        ]
        return CapturedState(
            weights_name=self.weights_name,
            model=model,
            masters=masters,
            kind=kind,
            parameters=frozenset(live.keys() - buffers.keys()),
            buffers=frozenset(buffers),
            optimizer=optimizer,
            states=states,
            small=small,
            parts=parts,
            is_spread=is_spread,
            versions=versions_of([*model.values(), *tensors_in(optimizer), *guards]),
            own_buffers=own_buffers,
            sources=[(name, tensor) for name, tensor in sources if not sharding.is_stand_in(tensor, parts)],
            finite=self._finite_buffers & buffers.keys() if are_cloned else frozenset(),
            scale=_scale_of(objects.get(SCALER_NAME)),
            uncut=local_world_size if is_late else None,
        )

    def weights(self) -> dict[str, Any]:
        """Return what is saved of the model by reference, by name; also what modules return as extra state."""
        if self.adapter is not None:
            return self.adapter.weights(self.model)
        return self.model.state_dict(keep_vars=True)

    def _own_states(self, states: Mapping[str, Any], live: Iterable[Any], kind: StateKind) -> dict[str, Any]:
        """Return what is saved besides what is named in `states`; it may change at any moment, too.

        Args:
            states: Their state dicts.
            live: What is saved of the model.
            kind: How ranks hold it.

        Raises:
            CheckpointError: It cannot be saved.
        """
        base = self.adapter.changed_base(self.model) if self.adapter is not None else {}
        found = self._trained_elsewhere(states, live, kind)
        return ({BASE_STATE: base} if base else {}) | {name: freeze(one.state_dict()) for name, one in found.items()}

    def _trained_elsewhere(
        self, states: Mapping[str, Any], live: Iterable[Any], kind: StateKind
    ) -> dict[str, TrainedElsewhere]:
        """Return the parameters that the optimizer trains and that nothing else which is saved holds, as a state."""
        saved = set(map(id, live))
        missing = [parameter for parameter in kind.trained if id(parameter) not in saved]
        if missing:
            # Few trainings come here, which takes longer.
            holders = [self.model, *(one for one in self.states.values() if isinstance(one, torch.nn.Module))]
            saved |= {id(parameter) for holder in holders for parameter in holder.parameters()}
            # What has no memory of its own (a sparse tensor, say) is refused elsewhere.
            whole = [
                one
                for one in tensors_in(list(states.values()))
                if one.layout is torch.strided and not sharding.is_sharded(one)
            ]
            places = {tensor.data_ptr() for tensor in whole}
            missing = [one for one in missing if id(one) not in saved]
            missing = [one for one in missing if sharding.is_sharded(one) or one.data_ptr() not in places]
        return {TRAINED_STATE: TrainedElsewhere(missing)} if missing else {}

    def _changes(self, live: Mapping[str, Any], kind: StateKind) -> dict[str, bytes]:
        """Return what tells a resumed run the buffers that its fresh start lacks, or has in another shape.

        Raises:
            CheckpointError: The model is one that a resume could not load.
        """
        if self.fresh is None:
            return {}
        names = self.fresh.changed_buffers(live, may_change=self.adapter is None and not kind.is_cut)
        return {BUFFERS_NAME: json.dumps({"names": names}).encode()} if names else {}

    def _optimizer_files(self, state: Any, kind: StateKind) -> dict[str, bytes]:
        """Return small files of the optimizer: where its state dict has a layout of its own, its parameters' order.

        Raises:
            CheckpointError: A resume could not load it; or what belongs to a parameter cannot be cut as that is.
        """
        if is_of_torch(state):
            if self.fresh is not None and self.held_as is None:
                self.fresh.check_groups(state["param_groups"])
            return kind.files(state)
        name = type(self.torch_optimizer).__name__
        if kind.is_cut:
            raise CheckpointError(
                f"{name} is not supported where parameters are sharded: its state_dict has a layout of its own, which "
                "cannot be cut. Use an optimizer whose state_dict is as those of torch.optim, or DDP"
            )
        digest = order_digest(self.torch_optimizer, self.model)
        return {ORDER_NAME: json.dumps({"optimizer": name, "parameters": digest}).encode()} if digest else {}

    def _own_optimizer_state(
        self, state: Any, kind: StateKind, point: LoadedCheckpoint, place: Callable[[Any], Any]
    ) -> Any:
        """Return what this rank's optimizer loads of the state in a checkpoint; `place` is that of `restore_model`.

        Raises:
            ValueError: It is of another kind of optimizer, or of other parameters.
        """
        state = kind.own_state(state)
        if is_of_torch(state):
            return place(point.cut_optimizer_state(state, self.torch_optimizer))
        if point.has(ORDER_NAME):
            now = order_digest(self.torch_optimizer, self.model)
            if point.json(ORDER_NAME).get("parameters") != now:
                raise ValueError("the optimizer has other parameters now, or has them in another order")
        # Where it keeps what it is given, is not known.
        return state if point.private else copy.deepcopy(state)

    def _live_state(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]:
        """Return the model's tensors by name, small objects by file, and ready-made files."""
        objects: dict[str, Any] = {}
        if self.scheduler is not None:
            objects[SCHEDULER_NAME] = freeze(self.scheduler.state_dict())
        if self.scaler is not None:
            objects[SCALER_NAME] = freeze(self.scaler.state_dict())
        small: dict[str, bytes] = {}
        if self.adapter is not None:
            small[BASE_NAME] = self.adapter.identify(self.model)
        live = self.weights()
        # A module's `get_extra_state` may return anything.
        extra = {name: freeze(value) for name, value in live.items() if not isinstance(value, torch.Tensor)}
        if extra:
            objects[EXTRA_STATE_NAME] = extra
            live = {name: value for name, value in live.items() if name not in extra}
        return live, objects, small

    def check(self) -> None:
        """Check that the state can be saved.

        Raises:
            CheckpointError: Something in `states` is sharded.
        """
        states = {name: stateful.state_dict() for name, stateful in self.states.items()}
        states |= {name: one.state_dict() for name, one in self._trained_elsewhere(states, (), self.kind).items()}
        for name, state in states.items():
            # A state dict does not show what ZeRO-3 has partitioned.
            stateful = self.states.get(name)
            parameters = stateful.parameters() if isinstance(stateful, torch.nn.Module) else ()
            if any(map(sharding.is_sharded, [*tensors_in(state), *parameters])):
                raise CheckpointError(
                    f"states: {name!r} holds sharded tensors, which is not supported yet: only of model and optimizer"
                )

    def restore_model(self, point: LoadedCheckpoint, place: Callable[[Any], Any] = lambda state: state) -> None:
        """Load the weights, each from the most precise file that the checkpoint has of it.

        Args:
            point: The state to load from.
            place: Moves a state dict to the device where it is wanted.

        Raises:
            CheckpointError: The checkpoint is of another model.
        """
        kind, sources = self.kind, dict[str, tuple[str, torch.Tensor]]()
        for buffer in self.model.buffers():
            if is_expanded(buffer):
                buffer.data = buffer.contiguous()
        kind.release()
        if self.adapter is not None:
            restored = self.adapter.restore(self.model, point)
            names = {id(parameter): name for name, parameter in self.model.named_parameters()}
            sources |= {names[key]: (ADAPTER_NAME, value) for key, value in restored.items() if key in names}
        else:
            sources |= {name: (MODEL_NAME, value) for name, value in kind.load_weights(point, place).items()}
        precise = point.model_state(MASTER_NAME) if point.has(MASTER_NAME) else {}
        sources |= {name: (MASTER_NAME, value) for name, value in precise.items()}
        for name, parameter in self.model.named_parameters():
            # Written where the model had a shorter type than now.
            if name in precise and parameter.dtype == precise[name].dtype:
                sharding.fill(parameter, point.cut(MASTER_NAME, precise[name], parameter, in_place=True))
        kind.restore_masters(point, sources)

    def check_number_of_ranks(self, point: LoadedCheckpoint, world_size: int) -> None:
        """Check that what a checkpoint holds of each rank alone can be given to so many ranks.

        Raises:
            CheckpointError: It was saved by another number of ranks, and an object does not say how it is divided.
        """
        first = rank_state_name(0)
        if point.world_size == world_size or not point.has(first):
            return
        saved = point.torch_object(first).get("states", {})
        names = [name for name, one in self.states.items() if name in saved and not hasattr(one, "load_state_dicts")]
        if not names:
            return
        problem = (
            f"{point.label} holds {names[0]!r} of `states` for each of {point.world_size} ranks, which differed, and "
            f"there are {world_size} now"
        )
        if not rank_settings().allow_changes:
            raise CheckpointError(
                f"{problem}: some of it would be lost or repeated. Start {point.world_size} ranks; or give the object "
                "a method load_state_dicts(states), which each rank calls with those of all, by rank; or accept "
                f"that new ranks begin with rank 0's, by --allow-changes ({ALLOW_CHANGES_ENV}=1)"
            )
        if point.rank == 0:
            logger.warning("%s: each keeps its own, and a new one begins with that of rank 0", problem)

    def restore_states(
        self, point: LoadedCheckpoint, rank: int, names: Set[str], world_size: int | None = None
    ) -> dict[str, Any]:
        """Load the further `states` of these names; return what the checkpoint holds of this rank alone.

        Where that was saved by other ranks than the `world_size` of now, an object may have `load_state_dicts`.

        Raises:
            CheckpointError: A file cannot be parsed, or does not fit.
        """
        own = rank_state_name(rank) if point.has(rank_state_name(rank)) else rank_state_name(0)
        ranks: dict[str, Any] = point.own_object(own) if point.has(own) else {}
        states = {name: stateful.state_dict() for name, stateful in self.states.items()}
        elsewhere = self._trained_elsewhere(states, (), self.kind)
        for name, stateful in {**self.states, **elsewhere}.items():
            if name not in names:
                continue
            if point.has(f"{name}.pt"):
                _put(stateful, point, f"{name}.pt", point.own_object(f"{name}.pt"))
            elif name in ranks.get("states", {}):
                if world_size not in (None, point.world_size) and hasattr(stateful, "load_state_dicts"):
                    files = map(rank_state_name, range(point.world_size))
                    _put(_Divided(stateful), point, own, [point.own_object(file)["states"][name] for file in files])
                else:
                    _put(stateful, point, own, ranks["states"][name])
            else:
                _warn_of_missing(point, f"state {name!r}")
        return ranks

    def restore_optimizer(
        self,
        point: LoadedCheckpoint,
        rank: int,
        place: Callable[[Any], Any] = lambda state: state,
        world_size: int | None = None,
    ) -> None:
        """Load the state of optimizer, scheduler, scaler, of the further `states`, and what is this rank's own.

        Args:
            point: The state to load from.
            rank: Number of this rank.
            place: See `restore_model`.
            world_size: Number of all ranks; None where nothing depends on it.

        Raises:
            CheckpointError: A file cannot be parsed, or is of another optimizer.
        """
        kind = self.kind
        optimizers = [self.torch_optimizer, *held_by(self.torch_optimizer)]
        states = [own for optimizer in optimizers for own in getattr(optimizer, "state", {}).values()]
        before = tensors_in([list(own.values()) for own in states])
        _load(
            self.optimizer,
            point,
            OPTIMIZER_NAME,
            lambda state: self._own_optimizer_state(state, kind, point, place),
        )
        own_name = point.own_name if kind.restore_options(point) else str
        _warn_of_frozen(self.model, self.torch_optimizer, point)
        if not point.private:
            for optimizer in optimizers:
                _own_what_stayed_on_the_host(optimizer, before)
        ranks = self.restore_states(point, rank, {*self.states, TRAINED_STATE}, world_size)
        if point.has(rank_state_name(rank)):
            # The model's own file has rank 0's.
            _fill_buffers(self.model, ranks.get("buffers", {}))
        _load_if_there(self.scheduler, point, SCHEDULER_NAME, own_name)
        _load_if_there(self.scaler, point, SCALER_NAME, own_name)


class _Divided:
    """An object in `states` that takes the state dicts of all ranks."""

    def __init__(self, stateful: Any) -> None:
        self.load_state_dict = stateful.load_state_dicts


def _check_new_kinds(files: Mapping[str, Any], readable: set[object], late: Set[str]) -> None:
    """Check that files can be read back which hold kinds of values that were in none before.

    A best loss that was None at first, say, may be a number of a library's own later.
    """
    new: set[object] = set()
    for name, value in files.items():
        kinds: set[object] = set()
        kinds_in(value, kinds)
        if not kinds <= readable and name not in late:
            check_readable(name, value)
        new |= kinds
    readable |= new


def _small_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are saved, by name, unless they are large: plain tensors that have contents."""
    found = {
        f"{prefix}.{name}".lstrip("."): value
        for prefix, module in model.named_modules()
        for name, value in module._buffers.items()
        if name not in module._non_persistent_buffers_set
        and type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.device.type != "meta"
    }
    return found if sum(value.nbytes for value in found.values()) <= _CLONE_BYTES else {}


def _scale_of(scaler: Any) -> float | None:
    """Return the scale in the state dict of a gradient scaler; None where it is not enabled."""
    scale = scaler.get("scale") if isinstance(scaler, dict) else None
    return float(scale) if isinstance(scale, (int, float)) else None


def _load(stateful: Any, point: LoadedCheckpoint, name: str, change: Callable[[Any], Any] | None = None) -> None:
    state = point.torch_object(name)
    _put(stateful, point, name, state, change)


def _load_if_there(stateful: Any, point: LoadedCheckpoint, name: str, own_name: Callable[[str], str]) -> None:
    if stateful is not None and point.has(name):
        _load(stateful, point, own_name(name))
    elif stateful is not None:
        _warn_of_missing(point, name.removesuffix(".pt"))


def _warn_of_missing(point: LoadedCheckpoint, what: str) -> None:
    if point.rank == 0:
        logger.warning("%s holds no %s: training begins with a new one", point.label, what)


def _put(
    stateful: Any, point: LoadedCheckpoint, name: str, state: Any, change: Callable[[Any], Any] | None = None
) -> None:
    optimizer = inner_optimizer(stateful)
    memory = OptimizerMemory([optimizer, *held_by(optimizer)])
    try:
        stateful.load_state_dict(change(state) if change is not None else state)
    except CheckpointError:
        # The checkpoint's bytes may be read only now: they were altered, or storage does not answer.
        raise
    except Exception as error:
        raise CheckpointError(
            f"{point.label}: {name} does not fit this {type(stateful).__name__}: {type(error).__name__}: {error}. Use "
            "the one that wrote it, or another output_dir."
        ) from error
    if (replaced := memory.put_back()) and point.rank == 0:
        logger.warning(
            "%s: %d tensors of the optimizer (%s) are new ones now, since the checkpoint has others or none: whatever "
            "holds the old ones, such as a CUDA graph that was captured before resume(), must be made again",
            point.label,
            len(replaced),
            ", ".join(replaced[:3]),
        )


def _own_what_stayed_on_the_host(optimizer: Any, before: Iterable[torch.Tensor]) -> None:
    """Copy the optimizer's state on the CPU that is still a view of the checkpoint, and no tensor of before."""
    kept = set(map(id, before))
    for state in getattr(optimizer, "state", {}).values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu" and id(value) not in kept:
                state[name] = value.clone()


def _warn_of_frozen(model: torch.nn.Module, optimizer: Any, point: LoadedCheckpoint) -> None:
    """Say where what was trained would not be any more: `requires_grad` is in no checkpoint."""
    state = getattr(optimizer, "state", {})
    frozen = [name for name, value in model.named_parameters() if not value.requires_grad and state.get(value)]
    if frozen and point.rank == 0:
        logger.warning(
            "%s has optimizer state of %d parameters that need no gradients now, such as %s: if the script has them "
            "trained from some step on, set requires_grad by the step, so that a resumed run does so, too",
            point.label,
            len(frozen),
            frozen[0],
        )


def _fill_buffers(model: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    buffers = dict(model.named_buffers()) if values else {}
    with torch.no_grad():
        for name, value in values.items():
            if name in buffers and buffers[name].shape == value.shape:
                buffers[name].copy_(value)


def _clone_small_cpu_tensors(obj: Any) -> Any:
    if isinstance(obj, torch.Tensor):
        small = obj.device.type == "cpu" and obj.nbytes <= _SMALL_TENSOR_BYTES and not sharding.is_sharded(obj)
        return obj.clone() if small else obj
    if isinstance(obj, dict):
        return {key: _clone_small_cpu_tensors(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return type(obj)(_clone_small_cpu_tensors(value) for value in obj)
    return obj


def hook_states(model: Any) -> list[object]:
    """Return what the communication hooks of a DDP-wrapped model keep between steps; empty for any other model."""
    # Whether DDP keeps (state, hook) or (hook, state) depends on the release.
    parts = (part for pair in getattr(model, "_comm_hooks", ()) for part in pair)
    return [part for part in parts if hasattr(part, "__dict__") and not callable(part)]


def hooks_with_memory(model: Any) -> list[str]:
    """Return the class names of communication hooks' states that hold tensors, or are meant to."""
    kinds = (torch.Tensor, torch.nn.Module, dict)
    states = [state for state in hook_states(model) if any(isinstance(value, kinds) for value in vars(state).values())]
    return sorted({type(state).__name__ for state in states})


# torchao quantizes the state of parameters with at least this many elements and a multiple of its block size.
_TORCHAO_MIN_NUMEL = 4096


def check_model(model: object) -> None:
    """Check that a model can be saved; None is allowed.

    Raises:
        CheckpointError: It is not one module that each rank holds whole or as FSDP2 has sharded it.
    """
    if model is None:
        return
    if type(model).__module__.startswith("torch.distributed.pipelining"):
        raise CheckpointError(
            f"{type(model).__name__} is not a model: give the module of this rank's stage, and pipeline=True"
        )
    if not isinstance(model, torch.nn.Module):
        raise CheckpointError(
            f"model is a {type(model).__name__}, not a torch.nn.Module; join several models in a torch.nn.ModuleList "
            "or ModuleDict, or give all but one in `states`"
        )
    # By name: importing FSDP takes half a second.
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise CheckpointError("FSDP1 (FullyShardedDataParallel) is not supported; use FSDP2: fully_shard(model)")


def check_optimizer(optimizer: Any) -> None:
    """Check that an optimizer can be saved; None is allowed.

    Raises:
        CheckpointError: It is not one optimizer whose state is equal on all ranks, or sharded as FSDP2 does it.
    """
    if isinstance(optimizer, (list, tuple, dict)):
        raise CheckpointError(
            f"optimizer is a {type(optimizer).__name__}; give one, and the others in `states`, for example "
            "states={'discriminator_optimizer': ...}"
        )
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise CheckpointError(
            "ZeroRedundancyOptimizer is not supported: each rank holds another part of its state. Use FSDP2, or the "
            "optimizer itself under DDP"
        )
    if type(optimizer).__module__.startswith("torchao."):
        block = getattr(optimizer, "block_size", None) or 1
        sizes = [parameter.numel() for group in optimizer.param_groups for parameter in group["params"]]
        if any(size >= _TORCHAO_MIN_NUMEL and size % block == 0 for size in sizes):
            raise CheckpointError(
                f"torchao's {type(optimizer).__name__} is not supported: its quantized state cannot be read without "
                "running code from the checkpoint. Use bitsandbytes' 8-bit optimizers (optim='adamw_bnb_8bit')"
            )
