from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from checkpointing.errors import CheckpointError
from checkpointing.rank.device import Host
from checkpointing.rank.file_images import (
    FileImage,
    TorchFileLayout,
    copy_literals,
    copy_tensors,
    place,
    safetensors_image,
    shares,
)
from checkpointing.rank.snapshotter import _who_differs


def materialise(images: list[FileImage], folder: Path, num_shares: int = 1) -> None:
    placed, nbytes = place(images)
    buffer = memoryview(bytearray(nbytes))
    for share in range(num_shares):
        copy_tensors(shares(placed, share, num_shares), buffer, Host())
    copy_literals(placed, buffer)
    for file in placed:
        (folder / file.image.name).write_bytes(buffer[file.offset : file.offset + file.image.nbytes])


STATE = {
    "a": torch.randn(3, 5),
    "half": torch.randn(7).to(torch.bfloat16),
    "flag": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "strided": torch.randn(4, 6).t(),
    "long": torch.arange(5),
}


class Hider:
    """An object with a tensor inside."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("num_shares", [1, 2, 3, 7])
def test_safetensors_file_is_read_back_equal(num_shares: int, tmp_path: Path) -> None:
    state = {**STATE, "tied": STATE["a"]}
    materialise([safetensors_image("m.safetensors", state)], tmp_path, num_shares)
    read = load_file(tmp_path / "m.safetensors")
    assert set(read) == set(STATE)
    for name, tensor in STATE.items():
        assert torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "tied": "a"}


def test_safetensors_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(CheckpointError, match=r"model\.c: safetensors cannot hold"):
        safetensors_image("m", {"c": torch.zeros(2, dtype=torch.complex128)})


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("num_shares", [1, 3])
def test_optimizer_file_is_read_back_equal_by_stock_torch(num_shares: int, mmap: bool, tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(torch.randn(9, 4)), torch.nn.Parameter(torch.randn(5))]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    layout = TorchFileLayout("optimizer.pt")
    # The learning rate changes the pickled part, and its length with it; the layout must follow.
    for rate in (1e-3, 0.1, 5):
        optimizer.param_groups[0]["lr"] = rate
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        materialise([layout.image(optimizer.state_dict())], tmp_path, num_shares)
        read = torch.load(tmp_path / "optimizer.pt", weights_only=True, mmap=mmap)
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        buffer.seek(0)
        expected = torch.load(buffer, weights_only=True)
        assert read["param_groups"] == expected["param_groups"]
        for index, state in expected["state"].items():
            for name, tensor in state.items():
                assert torch.equal(read["state"][index][name], tensor), (index, name)


def test_shared_storage_is_kept_shared(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    materialise([TorchFileLayout("x.pt").image({"all": base, "part": base[3:5]})], tmp_path)
    read = torch.load(tmp_path / "x.pt", weights_only=True)
    read["all"][3] = 99.0
    assert read["part"][0] == 99.0


def test_tensors_that_cannot_be_found_are_refused_by_name() -> None:
    state = {"weight": torch.zeros(3), "hidden": Hider(torch.ones(3))}
    with pytest.raises(ValueError, match=r"ema\.pt: tensors may only lie in dicts, lists and tuples"):
        TorchFileLayout("ema.pt").image(state)


def test_the_same_shapes_in_another_order_are_found(tmp_path: Path) -> None:
    layout = TorchFileLayout("x.pt")
    first, second = torch.zeros(1000), torch.ones(1000)
    for state in ({"a": first, "b": [second, {"c": first}]}, {"b": [second, {"c": first}], "a": first}):
        materialise([layout.image(state)], tmp_path)
        read = torch.load(tmp_path / "x.pt", weights_only=True)
        assert torch.equal(read["a"], first) and torch.equal(read["b"][0], second)
        assert torch.equal(read["b"][1]["c"], first)


@pytest.mark.parametrize(
    ("sums", "text"),
    [
        ([[1, 2], [1, 3]], "the 2 ranks hold different values"),
        ([[1, 2], [1, 3], [1, 2]], "rank 1 holds other values than the others"),
        ([[1], [2], [1], [3], [1]], "ranks 1, 3 hold other values than the others"),
        ([[1], [2], [1], [2]], "the 4 ranks hold different values"),
    ],
)
def test_the_rank_that_is_not_as_the_others_is_named(sums: list[list[int]], text: str) -> None:
    assert _who_differs(sums) == text
