"""Safetensors files are read back by the stock library, and in memory: only as the format says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.materialised import materialise
from safetensors import safe_open
from safetensors.torch import load_file

from checkpointing.errors import CheckpointError
from checkpointing.files.file_images import copy_tensors, pieces, place, shares
from checkpointing.files.safetensors_files import model_state, safetensors_image
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


def safetensors(header: dict[str, Any], body: bytes, align: int = 8) -> memoryview:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % align)
    return memoryview(bytearray(len(text).to_bytes(8, "little") + text + body))


def entry(begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // {"F32": 4, "U8": 1}[dtype]], "data_offsets": [begin, end]}


def test_tensors_are_over_the_bytes_of_the_file() -> None:
    buffer = safetensors({"a": entry(0, 8)}, np.array([1.0, 2.0], np.float32).tobytes())
    state = model_state(buffer)
    assert state["a"].tolist() == [1.0, 2.0]
    buffer[-8:] = bytes(8)
    assert state["a"].tolist() == [0.0, 0.0]


def test_a_tensor_at_an_odd_offset_is_copied() -> None:
    body = b"\x07" + np.array([1.0, 2.0], np.float32).tobytes()
    buffer = safetensors({"odd": entry(0, 1, "U8"), "a": entry(1, 9)}, body)
    state = model_state(buffer)
    buffer[-8:] = bytes(8)
    assert state["a"].tolist() == [1.0, 2.0] and state["odd"].tolist() == [7]


def test_tied_weights_are_the_same_tensor_and_unknown_owners_are_ignored() -> None:
    header = {"a": entry(0, 4), "__metadata__": {"tied": "a", "format": "pt", "a": "a"}}
    state = model_state(safetensors(header, bytes(4)))
    assert set(state) == {"a", "tied"} and state["tied"] is state["a"]


@pytest.mark.parametrize(
    ("header", "body", "problem"),
    [
        ({"a": entry(0, 4), "b": entry(8, 12)}, 12, "overlap, or leave gaps"),
        ({"a": entry(0, 4)}, 8, "overlap, or leave gaps"),
        ({"a": {**entry(0, 4), "shape": [2]}}, 4, "a: its shape does not fit"),
        ({"a": {**entry(0, 4), "shape": [True]}}, 4, "offsets or shape are not counts"),
    ],
)
def test_bytes_that_belong_to_no_tensor_or_to_two_are_refused(header: dict[str, Any], body: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        model_state(safetensors(header, bytes(body)))
