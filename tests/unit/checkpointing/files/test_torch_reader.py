"""Files are parsed in memory: without copies, and only as the formats say."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import numpy as np
import pytest
import torch

from checkpointing.files.torch_files import torch_bytes
from checkpointing.files.torch_reader import check_archive, filled, model_state, plain
from checkpointing.process import rng


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


def archive(how: int) -> memoryview:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", how) as file:
        file.writestr("archive/data/0", bytes(100))
        file.writestr("archive/data/1", bytes(10))
    return memoryview(bytearray(buffer.getvalue()))


def test_an_archive_as_torch_writes_it_is_accepted() -> None:
    check_archive(memoryview(torch_bytes({"a": torch.arange(3), "b": torch.ones(100)})))
    check_archive(archive(zipfile.ZIP_STORED))


def test_a_compressed_archive_is_refused() -> None:
    with pytest.raises(ValueError, match="'archive/data/0' is compressed"):
        check_archive(archive(zipfile.ZIP_DEFLATED))


def test_a_record_with_bytes_behind_it_that_no_record_owns_is_refused() -> None:
    data = archive(zipfile.ZIP_STORED)
    # The directory at the end says that the first record is shorter than it is.
    start = bytes(data).rindex(b"PK\1\2", 0, bytes(data).rindex(b"archive/data/0"))
    for field in (20, 24):
        data[start + field : start + field + 4] = (50).to_bytes(4, "little")
    with pytest.raises(ValueError, match="not where it should be"):
        check_archive(data)


def test_shared_storages_are_filled_once_and_stay_shared() -> None:
    base = torch.zeros(4)
    skeleton = {"all": base, "part": base[2:], "empty": torch.empty(0), "other": torch.zeros(1), "text": "kept"}
    body = np.arange(5, dtype=np.float32).tobytes()
    found = filled(skeleton, memoryview(bytearray(body)), [(0, 16), (0, 0), (16, 4)])
    assert found["all"].tolist() == [0, 1, 2, 3] and found["part"].tolist() == [2, 3]
    assert found["other"].tolist() == [4] and found["text"] == "kept" and found["empty"].numel() == 0
    found["all"][2] = 9
    assert found["part"][0] == 9


def test_whether_a_parameter_needs_gradients_is_kept() -> None:
    found = filled([torch.zeros(1, requires_grad=True)], memoryview(bytearray(4)), [(0, 4)])
    assert found[0].requires_grad


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([], "a storage of 8 bytes, where 0 are recorded"),
        ([(0, 4)], "a storage of 8 bytes, where 4 are recorded"),
        ([(0, 8), (8, 4)], "more storages than tensors"),
    ],
)
def test_records_of_other_storages_are_refused(records: list[tuple[int, int]], problem: str) -> None:
    # In bytes: torch before 2.11 counts other element sizes twice while it skips the data.
    skeleton = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(ValueError, match=problem):
        filled([skeleton], memoryview(bytearray(16)), records)


def test_arrays_that_were_wrapped_for_the_reader_are_unwrapped() -> None:
    words = rng.Words.__new__(rng.Words)
    words.array = np.arange(3)
    assert plain(words) is words.array and plain("text") == "text"
