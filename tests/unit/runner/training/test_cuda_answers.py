"""What CUDA is asked at import is answered by a fork; see `integration/test_fork.py` for the libraries."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from runner.training import cuda_answers
from runner.training.cuda_answers import answered_by_fork

CUDA: Any = torch.cuda


@pytest.fixture
def started_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replaces CUDA on a machine with two GPUs; the processes in which it was initialized, as far as they are this."""
    pids: list[int] = []
    cards = [SimpleNamespace(name=f"card {index}", major=9, minor=0, _uuid=object()) for index in range(2)]

    def properties(device: Any = None) -> Any:
        pids.append(os.getpid())
        return cards[device or 0]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(pids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return pids


def test_a_fork_tells_all_that_was_asked(started_in: list[int]) -> None:
    with answered_by_fork():
        kept = CUDA.get_device_properties
        assert CUDA.current_device() == 0
        asked = (None, 1, torch.device("cuda", 1), torch.cuda.device(1))
        assert [CUDA.get_device_properties(device).name for device in asked] == ["card 0"] + ["card 1"] * 3
        assert CUDA.get_device_capability(1) == (9, 0)
    assert started_in == []
    # A library may have kept the function: it is torch's from now on.
    assert kept(1).name == "card 1" and started_in == [os.getpid()]
    assert CUDA.current_device() == 1


def test_the_fork_does_not_fork_again(started_in: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks the same while it initializes CUDA there, before it counts as initialized."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: CUDA.get_device_properties(0) and 2)
    forks = list[int]()
    fork = os.fork

    def counted() -> int:
        forks.append(os.getpid())
        assert len(forks) == 1, "a fork of the fork"
        return fork()

    monkeypatch.setattr(os, "fork", counted)
    with answered_by_fork():
        assert CUDA.get_device_properties(1).name == "card 1"
    assert forks == [os.getpid()] and started_in == []


def test_where_a_fork_cannot_tell_torch_answers(started_in: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_answers, "_plain", lambda properties: 1 / 0)
    with answered_by_fork():
        assert CUDA.get_device_properties(1).name == "card 1"
    assert started_in == [os.getpid()]


def test_what_a_process_that_has_initialized_cuda_says_counts(started_in: list[int]) -> None:
    started_in.append(os.getpid())
    with answered_by_fork():
        assert CUDA.current_device() == 1 and CUDA.get_device_properties(0).name == "card 0"
    assert len(started_in) == 2


def test_a_library_and_the_compiler_keep_what_they_have(started_in: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler knows torch's functions by identity; a library may have replaced one."""
    before = CUDA.get_device_properties
    monkeypatch.delitem(sys.modules, cuda_answers._COMPILER, raising=False)
    with answered_by_fork():
        replaced = CUDA.current_device = lambda: 5
    assert CUDA.get_device_properties is before and CUDA.current_device is replaced
    with answered_by_fork():
        monkeypatch.setitem(sys.modules, cuda_answers._COMPILER, ModuleType("compiler"))
        known = CUDA.get_device_properties
    assert CUDA.get_device_properties is known and known(1).name == "card 1"
