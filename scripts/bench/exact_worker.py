"""One rank of the benchmark of virtual ranks: plain DDP and exact sums, a step of each in turn."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checkpointing.exact.gradients import ExactGradients


def model_of(width: int, layers: int) -> torch.nn.Module:
    """Return a transformer encoder, the same on all ranks."""
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
    return torch.nn.TransformerEncoder(block, layers, enable_nested_tensor=False)


def main() -> None:
    """Write each variant's seconds per step, and the bytes of the exchange, to a file."""
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    virtual_ranks, rounds = order["virtual_ranks"], order["rounds"]
    nets = [DistributedDataParallel(model_of(order["width"], order["layers"])) for _ in range(2)]

    def data(step: int, virtual_rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step * virtual_ranks + virtual_rank)
        return torch.randn(order["batch"], order["length"], order["width"], generator=generator)

    plain, exact_net = nets
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-4) for net in nets]
    exact = ExactGradients(exact_net, virtual_ranks)
    block = exact.block

    def plain_step(step: int) -> None:
        for virtual_rank in block:
            x = data(step, virtual_rank)
            if virtual_rank == block[-1]:
                plain(x).square().mean().backward()
            else:
                with plain.no_sync():
                    plain(x).square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()

    def exact_step(step: int) -> None:
        for virtual_rank in block:
            x = data(step, virtual_rank)
            with exact.of_rank(virtual_rank, step):
                exact_net(x).square().mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()

    steps: dict[str, Callable[[int], None]] = {"ddp": plain_step, "exact": exact_step}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + order["warm_up"]):
        # Which one is first alternates.
        names = list(steps) if number % 2 else list(reversed(steps))
        for name in names:
            dist.barrier()
            began = time.perf_counter()
            steps[name](number)
            dist.barrier()
            if number >= order["warm_up"]:
                seconds[name].append(time.perf_counter() - began)
    logged: Any = exact_net._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    found = {
        "seconds": seconds,
        "gradient_bytes": sum(p.numel() * p.element_size() for p in exact_net.parameters()),
        "exchange_bytes": exact.exchange_bytes,
        "most_sums": exact.most_sums,
        "bucket_bytes": max(map(int, logged["bucket_sizes"].split(","))),
        "world_size": world_size,
    }
    if rank == 0:
        Path(order["output"]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
