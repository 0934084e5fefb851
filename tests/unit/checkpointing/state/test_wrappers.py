"""What wraps a model is looked through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkpointing.state.param_names import innermost, is_wrapped, unwrapped


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    address = f"file://{tmp_path_factory.mktemp('group') / 'store'}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrappers", [["compile"], ["ddp"], ["compile", "ddp"], ["ddp", "compile"], []])
def test_wrappers_are_looked_through_in_any_order(wrappers: list[str]) -> None:
    make: dict[str, Callable[[torch.nn.Module], Any]] = {
        "compile": torch.compile,
        "ddp": torch.nn.parallel.DistributedDataParallel,
    }
    model: Any = torch.nn.Linear(2, 2)
    wrapped = model
    for name in wrappers:
        wrapped = make[name](wrapped)
    assert innermost(wrapped) is model
    for _ in wrappers:
        assert is_wrapped(wrapped)
        wrapped = unwrapped(wrapped)
    assert wrapped is model and not is_wrapped(model)
