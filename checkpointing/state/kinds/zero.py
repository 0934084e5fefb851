"""The state of a DeepSpeed engine (ZeRO 1, 2, 3), in the form that any other training has it.

ZeRO joins the parameters of a group in one flat tensor, of which each rank holds a range: a copy in full precision, and
the optimizer's state for it. Here each parameter's fragments of these are its own again, so the files of a checkpoint
are the same as without DeepSpeed, and any number of ranks can resume from them, with or without it. Of DeepSpeed's
checkpoint format, nothing is used.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.errors import CheckpointError
from checkpointing.files import sharding
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.files.sharding import Fragment, fragment_of
from checkpointing.process.ranks import Ranks
from checkpointing.state.kinds.state_kind import StateKind
from checkpointing.state.optimizer_memory import check_kind
from checkpointing.state.param_names import matched_by_name
from checkpointing.state.weights import load_parts

# Not `micro_steps`: where a step begins depends on how its samples are cut now.
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
# By their exact names: what derives from them may keep state elsewhere (SuperOffload).
_OPTIMIZERS = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer")


def is_engine(model: object) -> bool:
    """Return whether a model is wrapped in a DeepSpeed engine, without importing DeepSpeed."""
    module = sys.modules.get("deepspeed.runtime.engine")
    return module is not None and isinstance(model, module.DeepSpeedEngine)


@dataclass(frozen=True)
class _Slot:
    """Where a parameter is in a flat tensor.

    Attributes:
        parameter: The model's parameter.
        flat: What this rank holds, in full precision, of its group.
        begin: Place in `flat` of the first element that is the parameter's.
        first: Which element of the parameter that is.
        numel: How many follow it there.
    """

    parameter: torch.nn.Parameter
    flat: torch.Tensor
    begin: int
    first: int
    numel: int

    def of(self, flat: torch.Tensor) -> Fragment:
        """Return the parameter's fragment of a flat tensor that is laid out like `flat`."""
        own = flat.detach().view(-1)[self.begin : self.begin + self.numel]
        return Fragment(sharding.shape_of(self.parameter), self.first, own)


class ZeroState(StateKind):
    """The state of a DeepSpeed engine; it takes the place of the optimizer.

    Args:
        model: The engine.
        optimizer: Not used: the engine has its own.
        ranks: Not used.

    Raises:
        CheckpointError: The engine uses something that is not supported; the message names it.

    Attributes:
        engine: The engine.
    """

    is_cut = is_kept = True

    def __init__(self, model: Any, optimizer: Any = None, ranks: Ranks | None = None) -> None:
        _check_supported(model)
        self.engine, self.model, self.optimizer = model, model.module, self
        self._zero = model.optimizer
        self._slots = list(map(list, _slots(self._zero)))
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._all_slots = list(itertools.chain(*self._slots))
        self._names = {id(slot.parameter): names[id(slot.parameter)] for slot in self._all_slots}

    @classmethod
    def matches(cls, model: Any, *, pipeline: bool) -> bool:
        """Return whether the model is an engine."""
        return is_engine(model)

    def is_of(self, model: Any, optimizer: Any) -> bool:
        """Return whether it is that of this engine."""
        return model is self.engine or (optimizer is self and not is_engine(model))

    @property
    def base_optimizer(self) -> Any:
        """The optimizer of flat tensors inside DeepSpeed's."""
        return self._zero.optimizer

    def is_spread(self, local_world_size: int) -> bool:
        """Return whether there are several nodes: a range of each group is on one rank alone."""
        return dist.get_world_size() > local_world_size

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, as those of an optimizer of the model's parameters; `params` are the parameters' fragments."""
        return [
            {**_options(group), "params": [slot.of(slot.flat) for slot in slots]}
            for group, slots in zip(self.base_optimizer.param_groups, self._slots, strict=True)
        ]

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that the engine's optimizer has."""
        return [slot.parameter for slot in self._all_slots]

    @property
    def masters(self) -> dict[str, Fragment]:
        """The parameters in full precision, by name; without those that the model itself has in the same precision."""
        return {
            self._names[id(slot.parameter)]: slot.of(slot.flat)
            for slot in self._all_slots
            if slot.flat.dtype != slot.parameter.dtype
        }

    def expected_bytes(self, saved: list[torch.Tensor] | None, local_world_size: int, node_share: float) -> int:
        """Estimate the size of a node's snapshot, after the first step: all of the state, unless it is an adapter's."""
        if saved is not None:
            return super().expected_bytes(saved, local_world_size, node_share)
        elements = sum(math.prod(sharding.shape_of(parameter)) for parameter in self.trained)
        precise = next((slot.flat.element_size() for slot in self._all_slots), 4)
        tensors = [*self.model.parameters(), *self.model.buffers()]
        has_masters = bool(self.masters)
        nbytes = sum(map(sharding.nbytes_of, tensors)) + elements * precise * (2 + has_masters)
        return int(nbytes * node_share)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of `torch.optim.Optimizer.state_dict`, with fragments in place of tensors.

        Raises:
            CheckpointError: The optimizer has state of another kind, such as that of an 8-bit optimizer.
        """
        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        numbers = itertools.count()
        for group, slots in zip(self.base_optimizer.param_groups, self._slots, strict=True):
            options = _options(group)
            # Some fused optimizers count a group's steps, torch's those of each parameter.
            step = {"step": torch.tensor(float(options["step"]))} if "step" in options else {}
            # Other trainings may have parameters besides that are not trained.
            groups.append({**options, "params": [], "param_names": []})
            for slot in slots:
                number = next(numbers)
                groups[-1]["params"].append(number)
                groups[-1]["param_names"].append(self._names[id(slot.parameter)])
                if found := self.base_optimizer.state.get(slot.flat):
                    state[number] = step | {key: self._of(slot, key, value) for key, value in found.items()}
        return {"state": state, "param_groups": groups, "engine": self._counters()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned, cut to this rank's fragments; or the state of a torch optimizer.

        Args:
            state: As `own_state` returns it.
        """
        for group, slots, saved in zip(
            self.base_optimizer.param_groups, self._slots, state["param_groups"], strict=True
        ):
            group.update({key: saved[key] for key in (_options(group).keys() | {"step"}) & saved.keys()})
            for slot, number in zip(slots, saved["params"], strict=True):
                if own := state["state"].get(number):
                    if "step" in group:
                        group["step"] = int(own["step"])
                    self._load(slot, own, on_device=bool(group.get("fused") or group.get("capturable")))
        self._restore_counters(state.get("engine", {}))

    def own_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with the engine's groups: without parameters that are not trained.

        DeepSpeed knows only those that are; an optimizer of torch may have others, too.

        Raises:
            ValueError: It has other groups or parameters, or is of another kind of optimizer.
        """
        check_kind(self.base_optimizer, state)
        orders = [[self._names[id(slot.parameter)] for slot in slots] for slots in self._slots]
        state = matched_by_name(state, orders, partial=True)
        wanted, groups = list(map(len, self._slots)), list(state["param_groups"])
        if [len(group["params"]) for group in groups] != wanted:
            trained = [
                {**group, "params": [number for number in group["params"] if number in state["state"]]}
                for group in groups
            ]
            trained = [group for group in trained if group["params"]]
            # Groups of which nothing is trained stay where they are.
            groups = [trained.pop(0) if size and trained else {"params": []} for size in wanted] + trained
        found = [len(group["params"]) for group in groups]
        if found != wanted:
            given = [len(group["params"]) for group in state["param_groups"]]
            raise ValueError(f"it has groups of {given} parameters, the engine has {wanted}")
        return {**state, "param_groups": groups}

    def load_weights(self, point: LoadedCheckpoint, place: Callable[[Any], Any]) -> Mapping[str, torch.Tensor]:
        """Copy the weights into what this rank has of each parameter; return them."""
        return load_parts(self.model, point)

    def restore_masters(self, point: LoadedCheckpoint, sources: Mapping[str, tuple[str, torch.Tensor]]) -> None:
        """Load the parameters in full precision, and have the engine use these.

        What is in none of the sources is taken from the model.
        """
        for slot in self._all_slots:
            name, own = self._names[id(slot.parameter)], slot.of(slot.flat)
            if name in sources:
                sharding.fill(own, point.cut(*sources[name], own, in_place=True))
            else:
                held = fragment_of(slot.parameter)
                sharding.fill(own, _elements(slot) if held is None else held.tensor)
        persistent = getattr(self._zero, "persistent_parameters", ())
        if persistent:
            # Small parameters stay whole on each rank of ZeRO-3; they are assembled from what was loaded.
            persistent[0].all_gather(persistent)

    def release(self) -> None:
        """Have each rank of ZeRO-3 keep its fragments only: what an evaluation has assembled would stay in use."""
        offload = getattr(self._zero, "parameter_offload", None)
        if offload is not None:
            offload.partition_all_parameters()

    def _of(self, slot: _Slot, key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        if value.shape != slot.flat.shape:
            raise CheckpointError(
                f"DeepSpeed with {type(self.base_optimizer).__name__} is not supported: its {key} is not kept for each "
                "element. Use an optimizer whose state has the shape of the parameters, such as AdamW"
            )
        return slot.of(value)

    def _load(self, slot: _Slot, saved: Mapping[str, Any], *, on_device: bool) -> None:
        found = self.base_optimizer.state[slot.flat]
        for key, value in saved.items():
            if isinstance(value, torch.Tensor) and value.dim():
                if key not in found:
                    # As `torch.optim.Optimizer.load_state_dict` does: moments have the parameter's precision.
                    dtype = slot.flat.dtype if value.is_floating_point() else value.dtype
                    found[key] = torch.zeros_like(slot.flat, dtype=dtype, requires_grad=False)
                slot.of(found[key]).tensor.copy_(value)
            elif key == "step" and type(self.base_optimizer).__module__.startswith("deepspeed."):
                found[key] = int(value)
            elif key == "step" and on_device:
                # As `torch.optim.Optimizer.load_state_dict` does.
                found[key] = torch.as_tensor(value, dtype=torch.float32).to(slot.flat.device, copy=True)
            else:
                found[key] = value.clone() if isinstance(value, torch.Tensor) else value

    @property
    def _dynamic_scaler(self) -> Any:
        """The loss scale, where it changes; it is no state of other precisions."""
        scaler = getattr(self._zero, "loss_scaler", None)
        return scaler if getattr(scaler, "dynamic", False) else None

    def _counters(self) -> dict[str, Any]:
        scaler = self._dynamic_scaler
        scale = {name: getattr(scaler, name) for name in _LOSS_SCALE if hasattr(scaler, name)}
        return {name: getattr(self.engine, name) for name in _COUNTERS} | {"loss_scale": scale}

    def _restore_counters(self, saved: Mapping[str, Any]) -> None:
        for name in _COUNTERS:
            if name in saved:
                setattr(self.engine, name, saved[name])
        scaler = self._dynamic_scaler
        for name, value in saved.get("loss_scale", {}).items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _elements(slot: _Slot) -> torch.Tensor:
    return slot.parameter.detach().view(-1)[slot.first : slot.first + slot.numel]


def _slots(zero: Any) -> Iterator[Iterator[_Slot]]:
    """Yield, for each of the optimizer's groups, where its parameters are."""
    if hasattr(zero, "fp16_groups"):
        # Stage 3 divides groups further, and each parameter by itself.
        subgroups = list(zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True))
        for number in range(len(zero.optimizer.param_groups)):
            own = [pair for index, pair in enumerate(subgroups) if zero.sub_group_to_group_id[index] == number]
            yield itertools.chain.from_iterable(_partitioned_slots(*pair) for pair in own)
        return
    groups = zero.bf16_groups if hasattr(zero, "bf16_groups") else zero.bit16_groups
    flats = zero.fp32_groups_flat_partition if hasattr(zero, "bf16_groups") else zero.single_partition_of_fp32_groups
    for parameters, flat in zip(groups, flats, strict=True):
        yield (_mapped_slot(parameter, flat) for parameter in parameters)


def _partitioned_slots(parameters: Sequence[Any], flat: torch.Tensor) -> Iterator[_Slot]:
    begin = 0
    for parameter in parameters:
        own = fragment_of(parameter)
        assert own is not None
        yield _Slot(parameter, flat, begin, own.first, own.tensor.numel())
        begin += parameter.partition_numel()


def _mapped_slot(parameter: Any, flat: torch.Tensor) -> _Slot:
    mapping = parameter._hp_mapping
    if mapping is None:
        return _Slot(parameter, flat, 0, 0, 0)
    low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
    return _Slot(parameter, flat, high.start, low.start, low.numel)


def _check_supported(engine: Any) -> None:
    """Check that all of an engine's state is known.

    Raises:
        CheckpointError: It is not; the message names what is in the way.
    """
    zero = engine._config.zero_config
    offloads = [getattr(zero, name, None) for name in ("offload_optimizer", "offload_param")]
    wrong = {
        "pipeline parallelism": type(engine).__name__ == "PipelineEngine",
        "a mixture of experts": engine.has_moe_layers,
        "tensor parallelism": engine.mpu is not None or getattr(engine, "autotp_size", lambda: 0)() > 1,
        "offloading to NVMe": any(str(getattr(o, "device", "")).endswith("nvme") for o in offloads if o is not None),
        "hpZ (zero_hpz_partition_size)": zero.zero_hpz_partition_size > 1,
        "MiCS (mics_shard_size)": getattr(zero, "mics_shard_size", -1) > 0,
        "quantized weights or gradients": zero.zero_quantized_weights
        or zero.zero_quantized_gradients
        or getattr(zero, "zero_quantized_nontrainable_weights", False),
        # Its tables of where parameters are do not say so.
        "round_robin_gradients": getattr(zero, "round_robin_gradients", False) and zero.stage < 3,
        "partial offloading (offload_optimizer.ratio)": getattr(zero.offload_optimizer, "ratio", 1.0) < 1,
        "ZenFlow": getattr(zero, "zenflow", None) is not None,
        "torch_autocast with a gradient scaler": getattr(engine.optimizer, "torch_autocast_gradscaler", None),
        "sequence parallelism": getattr(engine, "sequence_parallel_size", 1) > 1,
    }
    for name, is_used in wrong.items():
        if is_used:
            raise CheckpointError(f"DeepSpeed with {name} is not supported; use ZeRO 1, 2 or 3 without it")
    if type(engine.optimizer).__name__ not in _OPTIMIZERS:
        raise CheckpointError(
            f"DeepSpeed's {type(engine.optimizer).__name__} is not supported; set zero_optimization.stage to 1, 2 or 3"
        )
