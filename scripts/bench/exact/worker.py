"""One rank of the benchmark of virtual ranks: plain DDP and exact sums, a step of each in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from library.orders import carry_out
from torch.nn.parallel import DistributedDataParallel

from checkpointing.exact.gradients import ExactGradients

BATCH, WARM_UP = 4, 3


def make_model(width: int, layers: int) -> DistributedDataParallel:
    """Return a transformer encoder, the same on all ranks."""
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
    return DistributedDataParallel(torch.nn.TransformerEncoder(block, layers, enable_nested_tensor=False))


def measure(virtual_ranks: int, rounds: int, width: int, layers: int, length: int) -> dict[str, Any] | None:
    """On rank 0, return each variant's seconds per step, and the bytes of the exchange."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plain, exact_net = (make_model(width, layers) for _ in range(2))
    plain_optimizer, exact_optimizer = (torch.optim.AdamW(net.parameters(), lr=1e-4) for net in (plain, exact_net))
    exact = ExactGradients(exact_net, virtual_ranks)
    block = exact.block

    def data(step: int, virtual_rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step * virtual_ranks + virtual_rank)
        return torch.randn(BATCH, length, width, generator=generator)

    def plain_step(step: int) -> None:
        for virtual_rank in block:
            x = data(step, virtual_rank)
            if virtual_rank == block[-1]:
                plain(x).square().mean().backward()
            else:
                with plain.no_sync():
                    plain(x).square().mean().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    def exact_step(step: int) -> None:
        for virtual_rank in block:
            x = data(step, virtual_rank)
            with exact.of_rank(virtual_rank, step):
                exact_net(x).square().mean().backward()
        exact_optimizer.step()
        exact_optimizer.zero_grad()

    steps: dict[str, Callable[[int], None]] = {"ddp": plain_step, "exact": exact_step}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + WARM_UP):
        # Which one is first alternates.
        names = list(steps) if number % 2 else list(reversed(steps))
        for name in names:
            dist.barrier()
            began = time.perf_counter()
            steps[name](number)
            dist.barrier()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    logged: Any = exact_net._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    found = {
        "seconds": seconds,
        "gradient_bytes": sum(p.numel() * p.element_size() for p in exact_net.parameters()),
        "exchange_bytes": exact.exchange_bytes,
        "most_sums": exact.most_sums,
        "bucket_bytes": max(map(int, logged["bucket_sizes"].split(","))),
    }
    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    return found if is_first else None


if __name__ == "__main__":
    carry_out({"steps": measure})
