"""What counts as a GPU that cannot be trusted; computed on the CPU, and on the second device by tests/device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.doctor import health

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_SIZE", 32)
    monkeypatch.setattr(health, "_MAX_BYTES", 1 << 16)


def test_a_sound_device_has_no_fault(small: None) -> None:
    assert list(health.faults_of(CPU)) == []


def test_a_wrong_product_is_found(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False, *[True] * 100])
    monkeypatch.setattr(torch, "equal", lambda *_: next(answers))
    assert list(health.faults_of(CPU)) == ["computes wrong products (1 of 20)"]


def test_a_bit_that_cannot_be_cleared_is_found(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = torch.Tensor.fill_

    def stuck(self: torch.Tensor, value: int) -> torch.Tensor:
        fill(self, value)
        self[7] |= 2
        return self

    monkeypatch.setattr(torch.Tensor, "fill_", stuck)
    assert list(health.faults_of(CPU)) == ["does not keep what is written to its memory (1 of 512 words)"]


def test_memory_is_tested_within_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 36))
    assert health._tested_bytes(torch.device("cuda", 0)) == (1 << 30) // 10
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    assert health._tested_bytes(torch.device("cuda", 0)) == 1 << 30


def test_each_gpu_is_named_and_one_that_is_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator: Any = SimpleNamespace(current_accelerator=lambda **_: torch.device("cuda"), device_count=lambda: 6)
    monkeypatch.setattr(torch, "accelerator", accelerator)

    def found(device: torch.device) -> Iterator[str]:
        if device.index == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if device.index == 4:
            # While the context is made, as long as a process that was killed has its memory.
            raise RuntimeError("CUDA error: out of memory\nCompile with ...")
        if device.index == 5:
            raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
        if device.index == 2:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCompile with ...")
        if device.index == 3:
            yield "computes wrong products (1 of 20)"

    monkeypatch.setattr(health, "faults_of", found)
    assert list(health.faults()) == [
        "GPU 2 failed: CUDA error: uncorrectable ECC error encountered",
        "GPU 3 computes wrong products (1 of 20)",
    ]


@pytest.mark.process
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU here")
def test_without_gpus_there_is_nothing_to_check() -> None:
    command = [sys.executable, "-m", "runner.doctor.health"]
    done = subprocess.run([*command, str(os.getpid())], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
    # The runner that has started it is gone already.
    assert subprocess.run([*command, "1"], capture_output=True).returncode == -signal.SIGKILL


@pytest.mark.parametrize(("between", "expected"), [("", []), ("compute a wrong sum together", ["GPUs 0 to 1 compute"])])
def test_sound_gpus_add_up_together(between: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator: Any = SimpleNamespace(current_accelerator=lambda **_: torch.device("cuda"), device_count=lambda: 2)
    monkeypatch.setattr(torch, "accelerator", accelerator)
    monkeypatch.setattr(health, "faults_of", lambda device: iter(()))
    asked = list[list[torch.device]]()

    def fault_between(devices: list[torch.device]) -> str:
        asked.append(devices)
        return between

    monkeypatch.setattr(health, "fault_between", fault_between)
    assert [fault[: len(start)] for fault, start in zip(health.faults(), expected, strict=True)] == expected
    assert asked == [[torch.device("cuda", 0), torch.device("cuda", 1)]]
