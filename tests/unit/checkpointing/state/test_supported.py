from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointing import CheckpointManager
from checkpointing.errors import CheckpointError
from checkpointing.state.train_state import check_model, check_optimizer


def linear(size: int = 2) -> torch.nn.Linear:
    return torch.nn.Linear(size, size)


class FullyShardedDataParallel(torch.nn.Module):
    """Of that name; the real one needs a process group."""


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Likewise."""


def quantizing(size: int) -> Any:
    """As torchao's tells itself apart; the real ones are in the compatibility table."""
    made = torch.optim.AdamW(linear(size).parameters())
    made.__class__ = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "torchao.optim.adam"})
    return made


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ([linear(), linear()], r"model is a list, not a torch\.nn\.Module; join several models in a torch\.nn\.Mod"),
        (SimpleNamespace(), "model is a SimpleNamespace"),
        (torch.nn.Sequential(linear(), FullyShardedDataParallel()), "FSDP1 .* is not supported; use FSDP2"),
        (type("PipelineStage", (), {"__module__": "torch.distributed.pipelining.stage"})(), "pipeline=True"),
    ],
)
def test_models_that_cannot_be_saved_are_refused_by_name(model: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_model(model)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ([torch.optim.SGD(linear().parameters())], "optimizer is a list; give one, and the others in `states`"),
        (ZeroRedundancyOptimizer(linear().parameters()), "ZeroRedundancyOptimizer is not supported"),
        (quantizing(64), "torchao's AdamW8bit is not supported"),
    ],
)
def test_optimizers_that_cannot_be_saved_are_refused_by_name(optimizer: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_optimizer(optimizer)


def test_what_can_be_saved_is_not_refused() -> None:
    check_model(None)
    check_model(linear())
    check_optimizer(None)
    check_optimizer(torch.optim.SGD(linear().parameters()))
    check_optimizer(quantizing(8))  # nothing of it is large enough


def test_processes_without_a_group_are_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them trained the same, and each wrote over the other's checkpoints."""
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        CheckpointError, match=r"2 processes were started .* is not initialized: call .*--nproc-per-node 1"
    ):
        CheckpointManager(str(tmp_path), model=linear())
    monkeypatch.setenv("WORLD_SIZE", "1")
    CheckpointManager(str(tmp_path), model=linear()).close()


def test_refused_when_the_manager_is_made(tmp_path: Any) -> None:
    models: Any = [linear(), linear()]
    with pytest.raises(CheckpointError, match="join several models"):
        CheckpointManager(str(tmp_path), model=models)
    assert not list(tmp_path.iterdir())
