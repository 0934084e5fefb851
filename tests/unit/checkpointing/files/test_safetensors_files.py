"""Safetensors files are read back by the stock library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.materialised import materialise
from safetensors import safe_open
from safetensors.torch import load_file

from checkpointing.errors import CheckpointError
from checkpointing.files.file_images import copy_tensors, pieces, place, shares
from checkpointing.files.safetensors_files import safetensors_image
from checkpointing.files.torch_reader import model_state
from checkpointing.process.device import HostDevice

STATE = {
    "a": torch.randn(3, 5),
    "half": torch.randn(7).to(torch.bfloat16),
    "flag": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "strided": torch.randn(4, 6).t(),
    "long": torch.arange(5),
}


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


@pytest.mark.parametrize("names", [["pt"], ["format"], ["pt", "format"]])
def test_a_tensor_may_be_called_as_the_format_is(names: list[str]) -> None:
    """A checkpoint of such a model could not be loaded: the metadata's "format: pt" was taken for an alias."""
    tensor = torch.arange(3.0)
    image = safetensors_image("model.safetensors", dict.fromkeys(names, tensor))
    data = b"".join(map(bytes, pieces(image, memoryview(bytearray(1 << 16)), HostDevice())))
    found = model_state(memoryview(bytearray(data)))
    assert found.keys() == set(names) and all(torch.equal(value, tensor) for value in found.values())


def test_safetensors_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(CheckpointError, match=r"model\.c: safetensors cannot hold"):
        safetensors_image("m", {"c": torch.zeros(2, dtype=torch.complex128)})


def test_what_differs_between_ranks_is_taken_from_the_nodes_first() -> None:
    image = safetensors_image("m", {"same": torch.ones(2), "other": torch.full((2,), 2.0)}, frozenset({"other"}))
    placed, nbytes = place([image])
    buffers = [memoryview(bytearray(nbytes)) for _ in range(2)]
    for share, buffer in enumerate(buffers):
        copy_tensors(shares(placed, share, 2), buffer, HostDevice())
    two = torch.full((2,), 2.0).numpy().tobytes()
    assert [two in bytes(buffer) for buffer in buffers] == [True, False]
