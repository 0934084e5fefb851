"""Ways to share a model among ranks; the suite runs each on 1, 2, 3, 4 and 8 ranks.

Each runs undisturbed twice, and is killed four times: after the first step, the second, the third and the eighth.
Whatever a library changes only once its first backward pass is over, DDP's buckets above all, lies before, between or
behind these.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from compatibility.ranks import Run
from compatibility.table import MAX_STEPS, case
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, VOCABULARY, LAYERS = 48, 96, 8
_KILLS: dict[str, Any] = {
    "kills": ((0, 1), (0, 2), (0, 3), (0, 8)),
    "saved": (1, 2, 3, 8),
    "timeout_s": 120.0,
    "twice": True,
}


class LowRank(nn.Module):
    """LoRA (Hu et al., 2021): a layer that stays as it is, and two small ones that are trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x) + self.up(self.down(x))
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.dropout(self.narrow(torch.relu(self.wide(self.norm(x)))))
        return found


class Language(nn.Module):
    """Embedding, some of the blocks, and head."""

    def __init__(self, *, lora: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if lora:
            self.requires_grad_(False)
            for block in self.blocks.values():
                block.wide = LowRank(block.wide)  # type: ignore[arg-type]

    def keep(self, first: int, last: int) -> None:
        """Keep the blocks of one stage of a pipeline."""
        for number in range(LAYERS):
            if not first <= number < last:
                del self.blocks[str(number)]
        if first:
            self.embedding = None
        if last < LAYERS:
            self.head = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if self.head is not None else x


def tokens_of(step: int, replica: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randint(0, VOCABULARY, (4, 12), generator=generator)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, 1).flatten())


def _initialize(run: Run) -> None:
    if run.world_size == 1:
        # DeepSpeed asks for it.
        os.environ["LOCAL_RANK"] = "0"
        dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    else:
        run.initialize()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)


def _train(
    run: Run, model: nn.Module, trained: nn.Module, replica: int, optimizer: torch.optim.Optimizer | None = None
) -> None:
    optimizer = optimizer or _optimizer(model)
    manager = run.manager(model=trained, optimizer=optimizer, save_steps=1, snapshot_steps=1)
    for step, _ in run.steps(manager):
        tokens = tokens_of(step, replica)
        loss = loss_of(trained(tokens), tokens)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.saw(step, "loss", float(loss.detach()))
        manager.step(step + 1)
    manager.close()
    run.finish(model=model, optimizer=optimizer)


def _ddp(run: Run, *, lora: bool) -> None:
    _initialize(run)
    model = Language(lora=lora)
    _train(run, model, DistributedDataParallel(model, bucket_cap_mb=0.1), run.rank)


def _fsdp(run: Run, *, lora: bool, hybrid: bool = False) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _initialize(run)
    model = Language(lora=lora)
    size = run.world_size
    # On an odd number of ranks, each is a replica.
    shards = 2 if size % 2 == 0 else 1
    shape, names = ((size // shards, shards), ("replicate", "shard")) if hybrid else ((size,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _train(run, model, model, run.rank)


def _tensor_parallel(run: Run, *, lora: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    _initialize(run)
    model = Language(lora=lora)
    mesh = init_device_mesh("cpu", (run.world_size,))
    for block in model.blocks.values():
        wide = "wide.base" if lora else "wide"
        whole = ColwiseParallel(output_layouts=Replicate())
        last = RowwiseParallel(input_layouts=Replicate()) if lora else RowwiseParallel()
        plan = {wide: whole if lora else ColwiseParallel(), "narrow": last}
        parallelize_module(block, mesh, plan)
    # All ranks draw alike, and compute the same samples.
    _train(run, model, model, 0)


def _pipeline(run: Run, *, lora: bool) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    _initialize(run)
    model, size, rank = Language(lora=lora), run.world_size, run.rank
    model.keep(rank * LAYERS // size, (rank + 1) * LAYERS // size)
    stage = PipelineStage(model, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=loss_of)
    optimizer = _optimizer(model)
    manager = run.manager(model=model, optimizer=optimizer, pipeline=True, save_steps=1, snapshot_steps=1)
    for step, _ in run.steps(manager):
        tokens = tokens_of(step, 0)
        inputs = (tokens,) if rank == 0 else ()
        schedule.step(*inputs, target=tokens if rank == size - 1 else None)
        optimizer.step()
        optimizer.zero_grad()
        manager.step(step + 1)
    manager.close()
    run.finish(model=model, optimizer=optimizer)


def _zero(run: Run, *, stage: int, lora: bool) -> None:
    import deepspeed

    # A transport through shared memory that it would compile first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _initialize(run)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    model = Language(lora=lora)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        # Several buckets.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(model), config=config)
    manager = run.manager(model=engine, save_steps=1, snapshot_steps=1)
    for step, _ in run.steps(manager):
        tokens = tokens_of(step, run.rank)
        loss = loss_of(engine(tokens), tokens)
        engine.backward(loss)
        engine.step()
        run.saw(step, "loss", float(loss.detach()))
        manager.step(step + 1)
    state = manager._tracked.state.kind.optimizer.state_dict()["state"]
    held = {
        f"{number} {name}": getattr(one, "tensor", one) for number, own in state.items() for name, one in own.items()
    }
    manager.close()
    run.finish(model=None if stage == 3 else model, held=held)


def _exact(run: Run, *, lora: bool) -> None:
    _initialize(run)
    model = Language(lora=lora)
    trained = DistributedDataParallel(model, bucket_cap_mb=0.1)
    optimizer = _optimizer(model)
    manager = run.manager(model=trained, optimizer=optimizer, virtual_ranks=8, save_steps=1, snapshot_steps=1)
    rows = torch.randint(0, VOCABULARY, (512, 12), generator=torch.Generator().manual_seed(3))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2, shuffle=True)
    for step, shares in zip(range(manager.resume(), MAX_STEPS), manager.shares(loader), strict=False):
        run.step_begins(step)
        for share in shares:
            with share:
                (tokens,) = share.batch
                torch.autograd.backward(loss_of(trained(tokens), tokens))
        optimizer.step()
        optimizer.zero_grad()
        manager.step(step + 1)
    manager.close()
    run.finish(model=model, optimizer=optimizer)


def _define(name: str, body: Callable[..., None], *, needs: tuple[str, ...] = (), **options: Any) -> None:
    for lora in (False, True):

        def run_it(run: Run, lora: bool = lora) -> None:
            body(run, lora=lora, **options)

        case(f"strategies/{name}{', LoRA' if lora else ''}", needs=needs, **_KILLS)(run_it)


_define("DDP", _ddp)
_define("DDP, exact mode", _exact)
_define("FSDP2", _fsdp)
_define("HSDP", _fsdp, hybrid=True)
_define("tensor parallelism", _tensor_parallel)
_define("pipeline", _pipeline)
for _stage in (1, 2, 3):
    _define(f"DeepSpeed ZeRO {_stage}", _zero, stage=_stage, needs=("deepspeed",))
