"""All-reduce over the ranks of a run, or over the accelerators of one node.

    python -m runner.doctor.all_reduce FILE

is one rank of `runner doctor`'s check of correctness, bandwidth, and speed compared with other ranks. torchrun starts
it like the ranks of a training. The first rank of each node writes the results of all as JSON.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from runner.system import processes

_SIZES = [1 << 20, 16 << 20, 64 << 20]
_REPEATS = 5
_ELEMENTS = 1 << 20
_SHARES = 64
# A link that transfers nothing: the back end ends the process then.
_TIMEOUT = timedelta(seconds=60)
# What a driver says where a process that was killed has its memory yet, or another one the whole GPU.
IN_USE = re.compile("out of memory|busy or unavailable", re.IGNORECASE)
# Exit status of a rank whose sum was wrong.
WRONG = 3


def all_reduce_is_right(device: torch.device, rank: int, world_size: int) -> bool:
    """Check the sum of small integers, which differ by position and rank.

    The sums are exact in float32 up to 16,000 ranks, in any order.
    """
    positions = torch.arange(_ELEMENTS, device=device, dtype=torch.float32) % 16
    value = positions * (rank % _SHARES + 1)
    dist.all_reduce(value)
    return bool(torch.equal(value, positions * sum(other % _SHARES + 1 for other in range(world_size))))


def bus_bandwidth(device: torch.device, nbytes: int, world_size: int) -> float:
    """Measure the bus bandwidth, in bytes per second, for a tensor of this size.

    As nccl-tests define it (doc/PERFORMANCE.md): size / time * 2 (n - 1) / n.
    """
    value = torch.ones(nbytes // 4, device=device)
    seconds = []
    for number in range(_REPEATS + 1):
        dist.barrier()
        _settle(device)
        began = time.perf_counter()
        dist.all_reduce(value)
        _settle(device)
        # The first operation also opens the connections.
        if number:
            seconds.append(time.perf_counter() - began)
        value.fill_(1.0)
    return nbytes / statistics.median(seconds) * 2 * (world_size - 1) / world_size


def compute_s(device: torch.device) -> float:
    """Return the seconds of a fixed amount of arithmetic, the same on equal, healthy devices."""
    size = 4096 if device.type == "cuda" else 512
    matrix = torch.full((size, size), 0.5, device=device)
    seconds = []
    for _ in range(_REPEATS):
        _settle(device)
        began = time.perf_counter()
        for _ in range(10):
            torch.mm(matrix, matrix)
        _settle(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fault_between(devices: Sequence[torch.device]) -> str:
    """Return what is wrong with an all-reduce over devices of this node, in words; empty if nothing is.

    A link between two accelerators may fail where each alone is sound. Tests pass the CPU several times.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (os.getpid(), [str(device) for device in devices], str(Path(folder) / "store"))
        try:
            spawn(_check_together, args=arguments, nprocs=len(devices))  # type: ignore[no-untyped-call]
        except ProcessExitedException as error:
            if error.exit_code == WRONG:
                return "compute a wrong sum together"
            if error.signal_name == signal.SIGKILL.name:
                # By another process, or since memory ran out.
                return ""
            return f"cannot communicate: rank {error.error_index} ended with {error.signal_name or error.exit_code}"
        except ProcessRaisedException as error:
            if IN_USE.search(str(error)):
                return ""
            return f"cannot communicate: {str(error).strip().splitlines()[-1]}"
    return ""


def _check_together(rank: int, parent: int, devices: list[str], store: str) -> None:
    processes.die_with_parent(lambda: os.getppid() != parent)
    device = torch.device(devices[rank])
    on_host = device.type == "cpu"
    if not on_host:
        torch.accelerator.set_device_index(device)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        init_method=f"file://{store}",
        rank=rank,
        world_size=len(devices),
        timeout=_TIMEOUT,
        device_id=None if on_host else device,
    )
    right = all_reduce_is_right(device, rank, len(devices))
    dist.barrier()
    dist.destroy_process_group()
    if not right:
        os._exit(WRONG)


def main() -> None:
    """Measure, and write the results of all ranks on the first rank of each node."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mine: dict[str, Any] = {
        "rank": rank,
        "host": os.uname().nodename,
        "right": all_reduce_is_right(device, rank, world_size),
        "bandwidth": {str(nbytes): bus_bandwidth(device, nbytes, world_size) for nbytes in _SIZES},
        "compute_s": compute_s(device),
    }
    measured: list[Any] = [None] * world_size
    dist.all_gather_object(measured, mine)
    # Each node reads its own.
    if int(os.environ["LOCAL_RANK"]) == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump({"backend": dist.get_backend(), "ranks": measured}, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
