"""One all-reduce over the devices of a node: real processes that meet with gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from runner.doctor import neighbours
from runner.doctor.neighbours import fault_between

TWO = [torch.device("cpu")] * 2
WRONG = """
import os, sys
from runner.doctor import neighbours
neighbours.all_reduce_is_right = lambda *_: False
neighbours._rank(0, os.getppid(), ["cpu"], sys.argv[1])
"""


@pytest.mark.process
def test_the_sum_of_sound_devices_is_right() -> None:
    assert fault_between(TWO) == ""


@pytest.mark.process
def test_a_wrong_sum_ends_a_rank_with_its_own_code(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WRONG, str(tmp_path / "store")], capture_output=True, text=True)
    assert done.returncode == neighbours.WRONG, done.stderr


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (ProcessExitedException("...", 1, 7, neighbours.WRONG), "compute a wrong sum together"),
        (
            ProcessExitedException("...", 1, 7, -6, "SIGABRT"),
            "cannot communicate: rank 1 ended with SIGABRT",
        ),
        (
            ProcessExitedException("...", 0, 7, 1),
            "cannot communicate: rank 0 ended with 1",
        ),
        (
            ProcessRaisedException("Traceback\nDistBackendError: NCCL error\n", 1, 7),
            "cannot communicate: DistBackendError: NCCL error",
        ),
    ],
)
def test_how_ranks_end_says_what_is_wrong(error: Exception, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(neighbours, "spawn", spawn)
    assert fault_between(TWO) == fault
