"""`torch.save` files that are laid out instead of serialised are read back by stock torch."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from helpers.materialised import materialise

from checkpointing.files.torch_files import TorchFileLayout, storage_records, torch_bytes


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
