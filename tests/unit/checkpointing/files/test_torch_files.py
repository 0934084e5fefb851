"""`torch.save` files that are laid out instead of serialised are read back by stock torch, and in memory."""

from __future__ import annotations

import collections
import io
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.materialised import materialise

from checkpointing.errors import CheckpointError
from checkpointing.files.torch_files import (
    TorchFileLayout,
    check_archive,
    check_readable,
    filled,
    plain,
    storage_records,
    torch_bytes,
)
from checkpointing.process import rng
from checkpointing.process.trees import freeze


class Hider:
    """An object with a tensor inside."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


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
    with pytest.raises(ValueError, match=r"ema\.pt: a tensor is inside another object"):
        TorchFileLayout("ema.pt").image(state)


def test_the_same_shapes_in_another_order_are_found(tmp_path: Path) -> None:
    layout = TorchFileLayout("x.pt")
    first, second = torch.zeros(1000), torch.ones(1000)
    for state in ({"a": first, "b": [second, {"c": first}]}, {"b": [second, {"c": first}], "a": first}):
        materialise([layout.image(state)], tmp_path)
        read = torch.load(tmp_path / "x.pt", weights_only=True)
        assert torch.equal(read["a"], first) and torch.equal(read["b"][0], second)
        assert torch.equal(read["b"][1]["c"], first)


def test_the_records_of_a_file_are_found_in_the_order_of_pickling() -> None:
    data = torch_bytes({"b": torch.arange(3), "a": torch.zeros(0), "c": torch.ones(5)})
    records = storage_records(io.BytesIO(data))
    assert [nbytes for _, nbytes in records] == [24, 0, 20]
    offset, nbytes = records[0]
    assert data[offset : offset + nbytes] == torch.arange(3).numpy().tobytes()


def test_a_file_of_another_byte_order_is_refused() -> None:
    data = torch_bytes(torch.ones(1)).replace(b"little", b"bigend")
    with pytest.raises(ValueError, match="another byte order"):
        storage_records(io.BytesIO(data))


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


class Own:
    pass


class Deque(collections.deque[Any]):
    """One of the script's own."""


class Pair(NamedTuple):
    first: int
    second: int


@dataclass
class Best:
    step: int


@pytest.mark.parametrize(
    "value",
    [
        1, 2.5, float("nan"), float("inf"), True, None, "text", b"bytes", 3 + 4j, (1, (2, [3])), {"a": {2: [None]}},
        collections.OrderedDict(a=1), torch.Size([2, 3]), torch.float32, torch.zeros(2, 3),
        torch.nn.Parameter(torch.ones(1)),
        np.arange(6.0).reshape(2, 3), np.array([True, False]), np.array([1, 2], dtype=np.uint8),
        np.float64(0.1), np.int64(7), np.bool_(True), np.float32(0.1), np.float16(2), np.uint8(3), np.complex64(1j),
        collections.deque([1, [2]], maxlen=3), collections.deque([torch.ones(2)]), collections.Counter("aab"),
        collections.defaultdict(int, a=1), collections.defaultdict(list, a=[torch.ones(1)]),
        collections.defaultdict(None, a=1),
    ],
)  # fmt: skip
def test_what_can_be_kept_exactly_is(value: Any) -> None:
    check_readable("mine.pt", freeze({"value": [value]}))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.datetime64("2026-01-01"), "numpy.datetime64"),
        (np.str_("text"), "numpy.str_"),
        (Deque([1]), "Deque"),
        (collections.defaultdict(lambda: 0, a=1), "collections.defaultdict of <function"),
        (Pair(1, 2), "Pair"),
        (Best(1), "Best"),
        (Path("x"), "pathlib"),
        (Own(), "Own"),
        (lambda: None, "function"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (np.array(["text"]), "numpy.ndarray"),
        (np.array([object()]), "numpy.ndarray"),
    ],
)
def test_what_cannot_is_refused_by_its_path(value: Any, kind: str) -> None:
    path = re.escape("optimizer.param_groups[0]['lr']")
    with pytest.raises(CheckpointError, match=rf"^{path}: .*{re.escape(kind)}"):
        check_readable("optimizer.pt", freeze({"param_groups": [{"lr": value, "betas": (0.9, 0.99)}]}))


@pytest.mark.parametrize("odd", [torch.eye(2).to_sparse(), Own()])
def test_it_is_found_behind_tensors_of_a_kind_that_was_seen(odd: Any) -> None:
    steps: list[Any] = [torch.zeros(())]
    state = {number: {"exp_avg": torch.zeros(3), "steps": list(steps)} for number in range(3)}
    check_readable("optimizer.pt", {"state": state})
    state[2]["steps"] = [*steps, odd]
    with pytest.raises(CheckpointError, match=r"^optimizer.state\[2\]\['steps'\]\[1\]: "):
        check_readable("optimizer.pt", {"state": state})


def test_the_file_that_is_read_back_does_not_grow_with_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    load = torch.load

    def measured(file: str, **options: Any) -> Any:
        sizes.append(Path(file).stat().st_size)
        return load(file, **options)

    monkeypatch.setattr(torch, "load", measured)
    for number in (2, 2000):
        check_readable("optimizer.pt", {"state": [{"exp_avg": torch.zeros(3)} for _ in range(number)]})
    assert sizes[1] < sizes[0] + 20_000


def test_numbers_of_numpy_become_pythons_where_nothing_is_lost() -> None:
    frozen = freeze({"lr": np.float64(0.1), "n": np.int64(3), "flag": np.bool_(False), "single": np.float32(0.1)})
    assert [type(value) for value in frozen.values()] == [float, int, bool, np.float32]


def test_a_dict_of_another_kind_stays_one() -> None:
    ordered = collections.OrderedDict([("b", torch.zeros(1)), ("a", 1)])
    frozen = freeze(ordered)
    assert type(frozen) is collections.OrderedDict and list(frozen) == ["b", "a"]
    ordered["b"] = None
    assert frozen["b"] is not None
    # MultiStepLR's milestones: they doubled with every save.
    assert freeze(collections.Counter({2: 1, 5: 1})) == collections.Counter({2: 1, 5: 1})
