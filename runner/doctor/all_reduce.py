"""One rank of `runner doctor`'s all-reduce check: correctness, bandwidth, and speed compared with other ranks.

torchrun starts it like the ranks of a training. The first rank of each node writes the results of all as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

_SIZES = [1 << 20, 16 << 20, 64 << 20]
_REPEATS = 5
_ELEMENTS = 1 << 20
_SHARES = 64


def all_reduce_is_right(device: torch.device, rank: int, world_size: int) -> bool:
    """Check the sum of small integers, which differ by position and rank.

    The sums are exact in float32 up to 16,000 ranks, in any order.

    Args:
        device: This rank's device.
        rank: This rank.
        world_size: Number of ranks.
    """
    positions = torch.arange(_ELEMENTS, device=device, dtype=torch.float32) % 16
    value = positions * (rank % _SHARES + 1)
    dist.all_reduce(value)
    return bool(torch.equal(value, positions * sum(other % _SHARES + 1 for other in range(world_size))))


def bus_bandwidth(device: torch.device, nbytes: int, world_size: int) -> float:
    """Measure the bus bandwidth as nccl-tests define it (doc/PERFORMANCE.md): size / time * 2 (n - 1) / n.

    Args:
        device: This rank's device.
        nbytes: Size of the tensor in bytes.
        world_size: Number of ranks.

    Returns:
        Bytes per second.
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
    # The rendezvous orders the nodes arbitrarily, so every node writes the file.
    if int(os.environ["LOCAL_RANK"]) == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump({"backend": dist.get_backend(), "ranks": measured}, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
