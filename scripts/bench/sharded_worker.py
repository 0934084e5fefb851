"""One rank of a training whose model is sharded over all ranks; started by `sharded.py`, through torchrun.

    sharded_worker.py train METHOD FOLDER STEPS SAVE_EVERY WIDTH LAYERS
    sharded_worker.py load METHOD FOLDER STEPS SAVE_EVERY WIDTH LAYERS

The model is sharded by FSDP2, by DeepSpeed's ZeRO-3 for a METHOD that ends with `zero`, or by nothing for `ours whole`.

Rank 0 prints one line "RESULT {json}".
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import checkpoint_worker
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

_TOKENS = 16
_VOCABULARY = 12288


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = hidden + self.down(torch.relu(self.up(hidden)))
        return added


class Model(nn.Module):
    """Only the number of bytes of its state matters."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.layers = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, _VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits


class Sharded(checkpoint_worker.Method):
    """Saves nothing."""

    def wait(self) -> None:
        """Return when the last save is durable."""

    def get_ready(self) -> None:
        """Start what loading needs."""

    def load(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class Dcp(checkpoint_worker.DcpSharedAsync, Sharded):
    """`torch.distributed.checkpoint`: `async_save` by a process, its state in shared memory; and `load`."""

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def wait(self) -> None:
        if self.upload is not None:
            self.upload.result()

    def load(self, step: int) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        state = self.state()
        load(state, checkpoint_id=str(self.folder / str(step)))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class DcpPlain(Dcp):
    """The same with DCP's own choices: training waits until the state was copied, and the copy was sent."""

    shared_memory = async_staging = False


class DeepSpeed(Sharded):
    """`DeepSpeedEngine.save_checkpoint`, which returns when all is written."""

    def save(self, step: int) -> None:
        engine: Any = self.model
        engine.save_checkpoint(str(self.folder), tag=str(step))


class Ours(Sharded):
    def __init__(self, model: Any, optimizer: Any, location: str) -> None:
        # Not a path: it may be in object storage.
        super().__init__(model, optimizer, Path())
        from checkpointing import CheckpointManager

        self.manager = CheckpointManager(location, model=model, optimizer=optimizer, snapshot_steps=None, keep_last=2)

    def save(self, step: int) -> None:
        self.manager.save(step, step)

    def after_step(self, step: int) -> None:
        self.manager.end_of_step(step)

    # The optimizer's own hook waits here; calling it measures the wait.
    def before_optimizer(self) -> None:
        self.manager._node.snapshots._copy_thread.pre_step_barrier()

    def wait(self) -> None:
        self.manager.wait_for_commit()

    # Under `runner start` the agent is there before the ranks are. Asking for it starts it.
    def get_ready(self) -> None:
        _ = self.manager._node.connection

    def load(self, step: int) -> None:
        found = self.manager.resume()
        assert found == step, (found, step)

    def close(self) -> None:
        self.manager.close()


def sharded(model: Model, name: str) -> tuple[Any, Any]:
    """Return DeepSpeed's engine, if it shards the model, and the optimizer."""
    if name == "ours whole":
        # All ranks draw the same samples, so that the replicas are equal without DDP.
        return None, torch.optim.AdamW(model.parameters(), lr=1e-4)
    if not name.endswith("zero"):
        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
        return None, torch.optim.AdamW(model.parameters(), lr=1e-4)
    import deepspeed

    # A transport through shared memory that it would compile first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), config=config
    )
    return engine, optimizer


def main(action: str, name: str, folder: str, steps: int, save_every: int, width: int, layers: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # DCP's process needs a group for each kind of device that it may find.
    dist.init_process_group("cpu:gloo")
    rank = dist.get_rank()
    model = Model(width, layers)
    state_bytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
    engine, optimizer = sharded(model, name)
    method: Sharded
    if name.startswith("ours"):
        method = Ours(engine or model, optimizer, folder)
    else:
        kinds = {"none": Sharded, "none zero": Sharded, "dcp": Dcp, "dcp plain": DcpPlain, "deepspeed zero": DeepSpeed}
        method = kinds[name](engine or model, optimizer, Path(folder))
    blocked: list[float] = []

    def train_step() -> None:
        tokens = torch.randint(0, _VOCABULARY, (1, _TOKENS))
        loss = nn.functional.cross_entropy((engine or model)(tokens).flatten(0, 1), tokens.flatten())
        engine.backward(loss) if engine is not None else torch.autograd.backward(loss)
        began = time.perf_counter()
        method.before_optimizer()
        if blocked:
            # Of the save before; 0 in the steps that follow.
            blocked[-1] += time.perf_counter() - began
        if engine is not None:
            engine.step()
            return
        optimizer.step()
        optimizer.zero_grad()

    result: dict[str, Any] = {"state_bytes": state_bytes}
    if action == "load":
        began = time.perf_counter()
        method.get_ready()
        result["ready_s"] = time.perf_counter() - began
        dist.barrier()
        began = time.perf_counter()
        method.load(steps)
        dist.barrier()
        result["load_s"] = time.perf_counter() - began
    else:

        def save_and_wait(step: int) -> float:
            train_step()
            method.after_step(step)
            dist.barrier()
            began = time.perf_counter()
            method.began[step] = time.time()
            method.save(step)
            method.wait()
            dist.barrier()
            return time.perf_counter() - began

        # Allocates gradients and moments, and whatever a method starts at its first save.
        save_and_wait(1)
        blocked = []
        began = time.perf_counter()
        for step in range(2, steps + 1):
            train_step()
            method.after_step(step)
            if step % save_every == 0:
                method.began[step] = time.time()
                save_began = time.perf_counter()
                method.save(step)
                blocked.append(time.perf_counter() - save_began)
        result["total_s"] = time.perf_counter() - began
        method.wait()
        result |= {"blocked_s": list(blocked), "durable_s": save_and_wait(steps + 1)}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, result)
    if rank == 0:
        if "blocked_s" in result:
            # A step waits for the slowest rank.
            of_ranks = zip(*(one["blocked_s"] for one in everyone), strict=True)
            result["blocked_s"] = [max(values) for values in of_ranks]
        print("RESULT " + json.dumps(result), flush=True)
    dist.barrier()
    method.close()
    dist.barrier()
    sys.stdout.flush()
    # An orderly exit would wait for threads and processes that peers leave; the driver ends them.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
