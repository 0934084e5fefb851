"""Where a model's weights come from: the most precise file that a checkpoint has of each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from checkpointing.errors import CheckpointError
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.format.layout import ADAPTER_NAME, MASTER_NAME, MODEL_NAME
from checkpointing.state.kinds.state_kind import StateKind
from checkpointing.state.train_state import TrainState
from checkpointing.state.weights import _copied_into, load_parts

EXACT = torch.full((2, 2), 1 / 3)


def point(**files: dict[str, torch.Tensor]) -> LoadedCheckpoint:
    names = {"model": MODEL_NAME, "masters": MASTER_NAME}
    contents = {names[name]: memoryview(bytearray(save(state))) for name, state in files.items()}
    return LoadedCheckpoint(
        "/runs/checkpoint-5", step=5, world_size=1, samples_consumed=5, files=contents, path=None, private=True
    )


def linear(dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    return torch.nn.Linear(2, 2, bias=False, dtype=dtype)


class Zero(StateKind):
    """What DeepSpeed's engine is given, instead of its state."""

    sources: Any = None

    released = False

    def __init__(self) -> None:
        pass

    def load_weights(self, point: LoadedCheckpoint, place: Any) -> dict[str, torch.Tensor]:
        return load_parts(self.model, point)

    def release(self) -> None:
        self.released = True

    def restore_masters(self, point: LoadedCheckpoint, sources: Any) -> None:
        assert self.released, "what an evaluation has assembled would stay in use"
        self.sources = {name: (file, tensor.dtype) for name, (file, tensor) in sources.items()}


def restore(model: torch.nn.Module, files: LoadedCheckpoint, zero: Zero | None = None, adapter: Any = None) -> None:
    if zero is not None:
        zero.model = model
    TrainState(model, None, adapter=adapter, held_as=zero).restore_model(files)


@pytest.mark.parametrize("zero", [None, Zero()])
def test_a_model_in_full_precision_gets_the_copy_in_full_precision(zero: Any) -> None:
    model = linear()
    restore(model, point(model={"weight": EXACT.bfloat16()}, masters={"weight": EXACT}), zero)
    assert torch.equal(model.weight, EXACT)


@pytest.mark.parametrize("zero", [None, Zero()])
def test_a_model_in_16_bits_gets_its_own(zero: Any) -> None:
    model = linear(torch.bfloat16)
    restore(model, point(model={"weight": EXACT.bfloat16()}, masters={"weight": EXACT}), zero)
    assert torch.equal(model.weight, EXACT.bfloat16())
    if zero is not None:
        assert zero.sources == {"weight": (MASTER_NAME, torch.float32)}


def test_an_engine_in_16_bits_continues_from_weights_in_full_precision() -> None:
    model, zero = linear(torch.bfloat16), Zero()
    restore(model, point(model={"weight": EXACT}), zero)
    assert torch.equal(model.weight, EXACT.bfloat16()) and zero.sources == {"weight": (MODEL_NAME, torch.float32)}


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"other": EXACT}, r"it lacks \['weight'\], and has \['other'\] besides"),
        ({"weight": torch.ones(3, 2)}, r"the shape of weight is \(3, 2\), here \(2, 2\)"),
    ],
)
def test_another_model_is_refused_before_anything_is_changed(state: dict[str, torch.Tensor], reason: str) -> None:
    model = linear()
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match=f"/runs/checkpoint-5 does not fit this model: {reason}"):
        restore(model, point(model=state), Zero())
    assert torch.equal(model.weight, before)


def test_an_adapter_is_restored_by_its_own_rules() -> None:
    model, restored = linear(), list[Any]()
    saved, zero = torch.full((2, 2), 0.5), Zero()

    def restored_by(model: torch.nn.Linear, point: LoadedCheckpoint) -> dict[int, torch.Tensor]:
        restored.append(model)
        return {id(model.weight): saved}

    adapter: Any = SimpleNamespace(restore=restored_by)
    restore(model, point(masters={"weight": EXACT}), adapter=adapter)
    assert restored == [model] and torch.equal(model.weight, EXACT)
    # Of an adapter in full precision, DeepSpeed's copy is that.
    restore(model, point(), zero, adapter)
    assert zero.sources == {"weight": (ADAPTER_NAME, torch.float32)}


class Counting(torch.nn.Linear):
    """Keeps what it is given, as FP8 layers do with their scales."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        self.count = torch.zeros(2)

    def get_extra_state(self) -> torch.Tensor:
        return self.count

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.count = state


@pytest.mark.parametrize("zero", [None, Zero()])
def test_a_tensor_of_a_modules_own_is_not_the_checkpoints_memory(zero: Any) -> None:
    """Ranks that resumed from memory counted for each other, and the next snapshot overwrote the counts."""
    model, saved = Counting(), {"weight": EXACT, "_extra_state": torch.tensor([3.0, 4.0])}
    files = point(model=saved)
    held = files.files[MODEL_NAME]
    before = bytes(held)
    restore(model, files, zero)
    assert model.count.tolist() == [3.0, 4.0]
    model.count += 1
    assert bytes(held) == before


def test_weights_in_a_wrapper_that_renames_them_are_copied_into() -> None:
    """Activation checkpointing: a clone of each would take the memory of a second model."""
    model = torch.nn.Sequential(checkpoint_wrapper(linear()), torch.nn.BatchNorm1d(2), Counting())
    names = {name for name in model.state_dict() if not name.endswith("_extra_state")}
    assert "0.weight" in names and _copied_into(model) == names


@pytest.mark.parametrize("zero", [None, Zero()])
def test_a_buffer_that_was_expanded_can_be_restored(zero: Any) -> None:
    """torch does not write to it: several of its elements are one in memory."""
    model = torch.nn.ModuleList([linear(), linear()])
    shared = torch.zeros(2, 1).expand(2, 3)
    for module in model:
        module.register_buffer("scale", shared)
    saved = {name: torch.full_like(value, 7).contiguous() for name, value in model.state_dict().items()}
    restore(model, point(model=saved), zero)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert model[0].scale is model[1].scale is shared


def test_the_names_of_earlier_releases_are_known() -> None:
    """They kept the name of torch.compile's wrapper."""
    model = linear()
    restore(model, point(model={"_orig_mod.weight": EXACT}))
    assert torch.equal(model.weight, EXACT)
