"""What is made of a file's bytes once their digest was found right."""

from __future__ import annotations

import collections
import io
import json
import os
import random
import warnings
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from checkpointing.errors import CheckpointError, InvalidCheckpoint
from checkpointing.files import loaded_checkpoint
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.files.torch_files import torch_bytes
from checkpointing.process import rng
from checkpointing.process.trees import freeze
from checkpointing.state.train_state import TrainState


def point(name: str, data: bytes) -> LoadedCheckpoint:
    files = {name: memoryview(bytearray(data))}
    return LoadedCheckpoint(
        "/runs/checkpoint-20", step=20, world_size=1, samples_consumed=80, files=files, path=None, private=True
    )


def safetensors(header: object, body: bytes = bytes(16)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(*offsets: object, dtype: str = "F32", shape: object = (2,)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 100,
        safetensors(b"[" * 3000),
        safetensors([]),
        safetensors({"a": entry(0, 8)}),  # a gap at the end
        safetensors({"a": entry(8, 16)}),
        safetensors({"a": entry(0, 16, shape=[4]), "b": entry(8, 16)}),  # an overlap
        safetensors({"a": entry(-8, 0), "b": entry(0, 16, shape=[4])}),
        safetensors({"a": entry(0, 2**60, shape=[2**58])}),
        safetensors({"a": entry(0, 16, shape=[2**60])}),
        safetensors({"a": entry(0, 16, shape=[-4])}),
        safetensors({"a": entry(0, 16, shape="4")}),
        safetensors({"a": entry(0, 16.0, shape=[4])}),
        safetensors({"a": entry(0, 16, dtype="F31", shape=[4])}),
        safetensors({"a": entry(0, 16, shape=[4]), "__metadata__": {"b": ["a"]}}),
        safetensors(b'{"a": {}, "a": {}}'),
    ],
)
def test_a_model_file_that_makes_no_sense_is_named(data: bytes) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"checkpoint-20: model\.safetensors .* cannot be parsed"):
        point("model.safetensors", data).model_state()


def test_what_is_not_in_a_checkpoint_is_named() -> None:
    for read in (LoadedCheckpoint.torch_object, LoadedCheckpoint.json):
        with pytest.raises(InvalidCheckpoint, match=r"scheduler\.pt is not in it"):
            read(point("x", b""), "scheduler.pt")
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors is not in it"):
        point("x", b"").model_state()


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_empty_tensors_that_share_their_storage(name: str) -> None:
    """They were counted twice: every tensor behind them got the bytes of the one before, or there were too few."""
    empty = torch.empty(0)
    state = {"a": empty, "b": empty.view(0, 1), "c": torch.arange(4.0), "d": torch.arange(4.0) + 10}
    read = point(name, torch_bytes(state)).torch_object(name)
    assert all(torch.equal(read[key], value) for key, value in state.items())


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize(
    "value",
    [
        collections.deque([1.5, [2], torch.ones(2)], maxlen=4),
        collections.defaultdict(list, a=[torch.arange(3)], b=[np.arange(2)]),
        collections.defaultdict(int, {3: 1}),
        collections.OrderedDict(b=1, a=[2]),
        collections.Counter("aab"),
        np.float32(0.1),
        np.uint8(200),
    ],
)
def test_containers_and_numbers_come_back_equal_and_of_their_kind(
    value: Any, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not small:
        monkeypatch.setattr(loaded_checkpoint, "SMALL_BYTES", 0)
    found = point("window.pt", torch_bytes(freeze({"value": value}))).own_object("window.pt")["value"]
    assert type(found) is type(value) and repr(found) == repr(value)
    for name in ("maxlen", "default_factory"):
        assert getattr(found, name, None) == getattr(value, name, None)


def rewritten(data: bytes, changes: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, changes.get(name.rpartition("/")[2], old.read(name)))
    return target.getvalue()


class Runs:
    """Unpickled by a careless reader, it runs a command."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


STATE = {"a": torch.arange(4.0), "b": [torch.arange(3)]}


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 100,
        torch_bytes(STATE)[:-30],
        torch_bytes(Runs()),
        rewritten(torch_bytes(STATE), {}, zipfile.ZIP_DEFLATED),
        rewritten(torch_bytes(STATE), {"data.pkl": b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."}),
        rewritten(torch_bytes(STATE), {"data.pkl": b"\x80\x02q"}),
    ],
    # Their own bytes hold the time of day: two workers of a test run would not collect the same tests.
    ids=lambda data: "",
)
def test_a_torch_file_that_makes_no_sense_is_named(name: str, data: bytes) -> None:
    with pytest.raises(InvalidCheckpoint, match=f"checkpoint-20: {name} .* cannot be parsed"):
        point(name, data).torch_object(name)


@pytest.mark.parametrize("change", [{"0": bytes(8)}, {"1": bytes(32)}, {"byteorder": b"big"}])
def test_records_that_are_not_the_ones_asked_for_fill_no_tensor(change: dict[str, bytes]) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"optimizer\.pt .* cannot be parsed"):
        point("optimizer.pt", rewritten(torch_bytes(STATE), change)).torch_object("optimizer.pt")


def test_a_shifted_record_fills_no_tensor() -> None:
    """torch believes the record's own header where its bytes begin, and we read there."""
    data = torch_bytes(STATE)
    place = data.index(b"data/0FB") - len(data[: data.index(b"data/0FB")].rpartition(b"PK\x03\x04")[2]) - 4
    damaged = bytearray(data)
    damaged[place + 28] -= 4
    with pytest.raises(InvalidCheckpoint, match=r"data/0' is compressed, or not where it should be"):
        point("optimizer.pt", bytes(damaged)).torch_object("optimizer.pt")


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_a_record_that_says_it_is_a_folder_fills_no_tensor(name: str) -> None:
    """torch read nothing, and the tensor held what happened to be in memory."""
    data = torch_bytes(STATE)
    entry = data.rindex(b"data/0") - len(data[: data.rindex(b"data/0")].rpartition(b"PK\x01\x02")[2]) - 4
    damaged = bytearray(data)
    damaged[entry + 38] |= 0x10
    with pytest.raises(InvalidCheckpoint, match=r"data/0' is compressed, or not where it should be"):
        point(name, bytes(damaged)).torch_object(name)


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"[" * 3000, b'{"a": 1' * 3])
def test_a_json_file_that_makes_no_sense_is_named(data: bytes) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"loop_state_0\.json .* cannot be parsed"):
        point("loop_state_0.json", data).json("loop_state_0.json")


@pytest.mark.parametrize("state", [None, [], {"param_groups": []}, {"state": {}, "param_groups": 3}])
def test_a_state_of_another_optimizer_is_named(state: object) -> None:
    model = torch.nn.Linear(2, 2)
    tracked = TrainState(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(CheckpointError, match=r"optimizer\.pt does not fit this AdamW"):
        tracked.restore_optimizer(point("optimizer.pt", torch_bytes(state)), 0)


# -- generators ------------------------------------------------------------------------------------------------------


def read_generators(states: object) -> None:
    name = "rng_state.pth"
    here = point(name, states if isinstance(states, bytes) else torch_bytes(states))
    with here.reading(name):
        rng.set_state(here.torch_object(name))


def draws() -> list[Any]:
    return [random.random(), random.gauss(), np.random.rand(800).tolist(), torch.rand(3).tolist()]


def test_generators_go_on_where_they_were() -> None:
    random.gauss(), np.random.randn()  # each keeps a second one
    states = torch_bytes(rng.state(1))
    expected = draws()
    read_generators(states)
    assert draws() == expected


def test_arrays_of_words_are_read_as_they_were() -> None:
    state = {
        "words": np.arange(6, dtype=np.uint32),
        "table": np.asfortranarray(np.arange(6, dtype=np.uint32).reshape(2, 3)),
    }
    for name in ("optimizer.pt", "average.pt"):
        read = point(name, torch_bytes(state)).torch_object(name)
        assert all(type(read[key]) is np.ndarray and np.array_equal(read[key], state[key]) for key in state)


def numpy_with(index: int, value: object) -> Callable[[dict[str, Any]], object]:
    def change(states: dict[str, Any]) -> object:
        words = list(states["numpy"])
        words[index] = value
        return {**states, "numpy": tuple(words)}

    return change


@pytest.mark.parametrize(
    "change",
    [
        # numpy then drew from memory that was not its own: a segmentation fault.
        numpy_with(2, 10**6),
        numpy_with(2, -5),
        numpy_with(2, 0.5),
        numpy_with(1, np.zeros(3, np.uint32)),
        numpy_with(3, 2),
        numpy_with(4, "x"),
        lambda states: {**states, "python": (3, states["python"][1], "x")},
        lambda states: {**states, "python": (3, (2**70,) * 625, None)},
        lambda states: {**states, "cpu": torch.zeros(10, dtype=torch.uint8)},
        lambda states: {**states, "cpu": torch.full((5056,), 255, dtype=torch.uint8)},
        lambda states: {name: value for name, value in states.items() if name != "cpu"},
        lambda states: [states],
    ],
)
def test_states_that_no_generator_can_have_are_refused_and_none_is_touched(
    change: Callable[[dict[str, Any]], object],
) -> None:
    states = rng.state(1)
    with pytest.raises(InvalidCheckpoint, match=r"rng_state\.pth .* cannot be parsed"):
        read_generators(change(states))
    after = rng.state(1)
    assert after["python"] == states["python"] and torch.equal(after["cpu"], states["cpu"])
    assert str(after["numpy"]) == str(states["numpy"])


class Forged:
    """An array whose one field is an object, somewhere else."""

    def __reduce__(self) -> Any:
        return np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"), (1, (1,), ForgedType(), False, b"A" * 8)  # type: ignore[attr-defined]


class ForgedType:
    def __reduce__(self) -> Any:
        field = {"a": (np.dtype("O"), 1 << 20)}
        return np.dtype, ("V8", False, True), (3, "|", None, ("a",), field, 8, 1, 0)


def test_no_array_can_be_made_that_points_to_other_memory() -> None:
    """numpy.dtype's __setstate__ believes the file; printing such an array was a segmentation fault."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("scheduler.pt", "optimizer.pt", "rng_state.pth"):
            with pytest.raises(InvalidCheckpoint, match="'V8'"):
                point(name, torch_bytes({"a": Forged()})).torch_object(name)


@pytest.mark.parametrize("key", [torch.ones(3), ("a", (torch.ones(3), 1))])
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_a_tensor_that_is_a_key_is_refused(name: str, key: object) -> None:
    """Of a skeleton its bytes would be whatever was in memory."""
    with pytest.raises(InvalidCheckpoint, match="key"):
        point(name, torch_bytes({"a": {key: 1}})).torch_object(name)
    plain = {"a": {("a", 1): torch.ones(3)}}
    assert point(name, torch_bytes(plain)).torch_object(name)["a"]["a", 1].tolist() == [1, 1, 1]
