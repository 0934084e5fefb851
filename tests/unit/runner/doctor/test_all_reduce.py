"""What one rank of the all-reduce check measures, with collectives and a clock of the test's own.

For the devices of a node, real processes meet with gloo.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from runner.doctor import all_reduce as ranks
from runner.doctor.all_reduce import fault_between

CPU = torch.device("cpu")
TWO = [torch.device("cpu")] * 2
WRONG = """
import os, sys
from runner.doctor import all_reduce
all_reduce.all_reduce_is_right = lambda *_: False
all_reduce._check_together(0, os.getppid(), ["cpu"], sys.argv[1])
"""


class Group:
    """In place of torch.distributed: `reduce` does what an all-reduce does to this rank's tensor."""

    def __init__(self, reduce: Callable[[torch.Tensor], object], world_size: int = 1) -> None:
        self.all_reduce, self._world_size = reduce, world_size
        self.is_open = False

    def barrier(self) -> None:
        pass

    def init_process_group(self, backend: str) -> None:
        self.backend, self.is_open = backend, True

    def get_backend(self) -> str:
        return self.backend

    def all_gather_object(self, everyone: list[Any], mine: Any) -> None:
        everyone[:] = [mine] * self._world_size

    def destroy_process_group(self) -> None:
        self.is_open = False


def test_the_sum_over_four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rank 1 gives twice what rank 0 gives, and so on: 1 + 2 + 3 + 4.
    monkeypatch.setattr(ranks, "dist", Group(lambda value: value.mul_(10 / 2)))
    assert ranks.all_reduce_is_right(CPU, 1, 4)
    assert not ranks.all_reduce_is_right(CPU, 0, 4)


def test_one_wrong_element_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(value: torch.Tensor) -> None:
        value[-1] += 1

    monkeypatch.setattr(ranks, "dist", Group(flip))
    assert not ranks.all_reduce_is_right(CPU, 0, 1)


def test_a_sum_that_leaves_out_a_rank_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "dist", Group(lambda value: value.mul_(1 + 2)))
    assert ranks.all_reduce_is_right(CPU, 0, 2) and not ranks.all_reduce_is_right(CPU, 0, 3)


def test_bandwidth_as_nccl_tests_define_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, took = [0.0], iter([60.0, 1.0, 3.0, 2.0, 1.0, 3.0])

    def reduce(value: torch.Tensor) -> None:
        assert value.numel() * value.element_size() == 4096 and bool((value == 1).all())
        value.mul_(2)
        clock[0] += next(took)

    monkeypatch.setattr(ranks, "dist", Group(reduce))
    monkeypatch.setattr(ranks, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    # Neither the first operation, which opens connections, nor slow ones count: 4096 B / 2 s * 2 * 3/4.
    assert ranks.bus_bandwidth(CPU, 4096, 4) == 4096 / 2.0 * 1.5


def test_the_median_of_the_arithmetic_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([0, 2, 10, 12, 20, 29, 30, 32, 40, 41])
    monkeypatch.setattr(ranks, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    assert ranks.compute_s(CPU) == 2


@pytest.mark.parametrize("local_rank", [0, 1])
def test_the_first_rank_of_each_node_writes_the_results_of_all(
    local_rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, file = Group(lambda value: value.mul_(3 / 2), world_size=2), tmp_path / "result.json"
    monkeypatch.setattr(ranks, "dist", group)
    monkeypatch.setattr(ranks, "_SIZES", [1024])
    monkeypatch.setattr(ranks, "compute_s", lambda device: 0.25)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(sys, "argv", ["ranks", str(file)])
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, str(value))
    ranks.main()
    assert not group.is_open and file.exists() is (local_rank == 0)
    if local_rank == 0:
        result = json.loads(file.read_text())
        assert result["backend"] == "gloo" and len(result["ranks"]) == 2
        one = result["ranks"][0]
        assert (one["rank"], one["right"], one["compute_s"], list(one["bandwidth"])) == (1, True, 0.25, ["1024"])


@pytest.mark.process
def test_the_sum_of_sound_devices_is_right() -> None:
    assert fault_between(TWO) == ""


@pytest.mark.process
def test_a_wrong_sum_ends_a_rank_with_its_own_code(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WRONG, str(tmp_path / "store")], capture_output=True, text=True)
    assert done.returncode == ranks.WRONG, done.stderr


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (ProcessExitedException("...", 1, 7, ranks.WRONG), "compute a wrong sum together"),
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

    monkeypatch.setattr(ranks, "spawn", spawn)
    assert fault_between(TWO) == fault
