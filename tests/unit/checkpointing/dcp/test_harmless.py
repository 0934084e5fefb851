"""What an index of torch's, and a value, may name."""

from __future__ import annotations

import collections
import datetime
import io
import pathlib
import pickle
import random
import subprocess
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpointing.dcp.harmless import check_index, check_value
from checkpointing.errors import CheckpointError

CHUNK = ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))


def index(**changes: Any) -> bytes:
    tensors = [
        TensorProperties(dtype, memory_format=torch.channels_last) for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    ]
    state: dict[str, Any] = {
        f"weight {number}": TensorStorageMetadata(properties, torch.Size([3]), [CHUNK])
        for number, properties in enumerate(tensors)
    }
    state["step"] = BytesStorageMetadata()
    metadata = Metadata(state, {"step": ("step",)}, {MetadataIndex("step"): None}, StorageMeta("/x", "1"))
    for name, value in changes.items():
        setattr(metadata, name, value)
    return pickle.dumps(metadata)


def test_an_index_of_data_is_read() -> None:
    check_index(index(), "/run/step-7")
    check_index(
        index(planner_data={"a": [("b", 1), frozenset({2}), collections.OrderedDict(c=complex(1))]}), "/run/step-7"
    )


class Call:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


@pytest.mark.parametrize(
    "bad",
    [
        Call(subprocess.Popen, ["true"]),
        Call(eval, "1"),
        Call(getattr, "x", "upper"),
        Call(torch.load, "/nothing"),
        Call(FileSystemWriter, "/nothing"),  # torch's, but no data class
        Call(random.Random, 1),
        datetime.timedelta(1),
    ],
    ids=lambda call: getattr(getattr(call, "function", call), "__name__", "timedelta"),
)
def test_an_index_that_names_anything_else_is_refused_before_it_is_made(bad: object) -> None:
    with pytest.raises(CheckpointError, match=r"^/run/step-7: its index names .*, which is no data"):
        check_index(index(planner_data=bad), "/run/step-7")


@pytest.mark.parametrize("name", ["pathlib\nPosixPath", "torch.distributed.checkpoint.metadata\nMetadata"])
def test_a_check_changes_no_class(name: str) -> None:
    """A pickle's BUILD set attributes of the classes that an index may name, for the whole process."""
    forged = b"\x80\x02c" + name.encode() + b"\nN}X\x0a\0\0\0read_bytesK\x01s\x86b."
    with pytest.raises(CheckpointError, match="attributes of a class"):
        check_index(forged, "/run")
    assert callable(pathlib.PosixPath.read_bytes) and not hasattr(Metadata, "read_bytes")


def test_names_with_dots_lead_nowhere() -> None:
    forged = b"\x80\x04\x8c\x27torch.distributed.checkpoint.filesystem\x8c\x09os.system\x93."
    with pytest.raises(CheckpointError, match=r"filesystem\.os\.system, which is no data"):
        check_index(forged, "/run")


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"nothing", index()[:-20]])
def test_what_is_no_index_is_refused_by_one_error(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^/run: its index"):
        check_index(data, "/run")


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize(
    "value",
    [
        7,
        1.5,
        "text",
        b"bytes",
        None,
        [1, (2, 3)],
        {"a": torch.ones(2)},
        np.random.RandomState(1).get_state(),
        random.getstate(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_programs_are_read(value: object) -> None:
    check_value(saved(value), "/run", "step")


@pytest.mark.parametrize("data", [saved(Call(eval, "1")), pickle.dumps(Call(eval, "1")), b"", b"nothing"])
def test_a_value_that_may_run_code_is_refused_with_what_to_do(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^/run: state is not read: .*add_safe_globals"):
        check_value(data, "/run", "state")
