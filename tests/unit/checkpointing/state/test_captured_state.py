"""A captured state of sharded tensors, which is cut after training went on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from checkpointing.files import sharding
from checkpointing.state.captured_state import CapturedState
from checkpointing.state.train_state import TrainState


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[torch.nn.Linear, TrainState]]:
    """A model whose weight is a DTensor of one rank, which has trained for a step."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model = torch.nn.Linear(3, 2)
    model.register_buffer("mean", torch.zeros(2))
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW([model.weight], lr=0.5)
    model.weight.grad = distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)])
    optimizer.step()
    yield model, TrainState(model, optimizer)
    dist.destroy_process_group()


def written(state: CapturedState) -> dict[str, torch.Tensor]:
    """Return this rank's part of each stand-in."""
    moments = {key: value for key, value in state.optimizer["state"][0].items() if value.ndim}
    return {
        name: state.parts[value.untyped_storage()._cdata].tensor
        for name, value in {"weight": state.model["weight"], **moments}.items()
    }


def test_a_state_that_is_cut_later_is_the_same(training: tuple[torch.nn.Linear, TrainState]) -> None:
    model, own = training
    late, at_once = own.capture(), own.capture(readable=set())
    assert late.uncut is not None and not late.parts and at_once.uncut is None
    # What training has whole meanwhile: the module's attribute is another tensor, the parameter stays.
    cut = late.cut()
    assert cut.cut() is cut and cut.changed() == 0
    assert not any(map(sharding.is_dtensor, cut.model.values()))
    for name, expected in written(at_once).items():
        assert torch.equal(written(cut)[name], expected), name
    # Small buffers are copies; training may change them at any moment.
    model.mean.fill_(7)  # type: ignore[operator]
    assert torch.equal(cut.model["mean"], torch.zeros(2)) and cut.changed() == 0


def local_change(weight: Any) -> None:
    weight._local_tensor.mul_(2)


def whole_change(weight: Any) -> None:
    weight.mul_(2)


@pytest.mark.parametrize("change", [local_change, whole_change])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_change_is_seen_before_and_after_the_cut(
    change: Any, is_cut: bool, training: tuple[torch.nn.Linear, TrainState]
) -> None:
    model, own = training
    state = own.capture().cut() if is_cut else own.capture()
    with torch.no_grad():
        change(model.weight)
    assert state.cut().changed() > 0


def test_memory_that_was_replaced_before_the_cut_counts_as_changed(
    training: tuple[torch.nn.Linear, TrainState],
) -> None:
    """Its version counter is one that was never captured."""
    model, own = training
    state = own.capture()
    assert isinstance(model.weight, DTensor)
    model.weight._local_tensor = model.weight._local_tensor.clone()
    assert state.changed() == 0 and state.cut().changed() > 0


def test_memory_of_a_plain_parameter_that_was_replaced_is_still_that_of_the_step(
    training: tuple[torch.nn.Linear, TrainState],
) -> None:
    """As by an average of the weights that is put in their place for an evaluation."""
    model, own = training
    expected, state = model.bias.detach().clone(), own.capture()
    model.bias.data = torch.full((2,), 9.0)
    assert torch.equal(state.cut().model["bias"], expected)
