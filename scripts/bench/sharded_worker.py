"""One rank of a training whose model is sharded over all ranks by FSDP2; started by `sharded.py`, through torchrun.

    sharded_worker.py train METHOD FOLDER STEPS SAVE_EVERY WIDTH LAYERS
    sharded_worker.py load METHOD FOLDER STEPS SAVE_EVERY WIDTH LAYERS

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


class Ours(Sharded):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, location: str) -> None:
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
        self.manager._snapshotter._copy_thread.pre_step_barrier()

    def wait(self) -> None:
        self.manager.wait_for_commit()

    def load(self, step: int) -> None:
        found = self.manager.resume()
        assert found == step, (found, step)

    def close(self) -> None:
        self.manager.close()


def main(action: str, name: str, folder: str, steps: int, save_every: int, width: int, layers: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # DCP's process needs a group for each kind of device that it may find.
    dist.init_process_group("cpu:gloo")
    rank = dist.get_rank()
    model = Model(width, layers)
    state_bytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    method: Sharded
    if name == "ours":
        method = Ours(model, optimizer, folder)
    else:
        method = {"none": Sharded, "dcp": Dcp}[name](model, optimizer, Path(folder))
    blocked: list[float] = []

    def train_step() -> None:
        tokens = torch.randint(0, _VOCABULARY, (1, _TOKENS))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        torch.autograd.backward(loss)
        began = time.perf_counter()
        method.before_optimizer()
        if blocked:
            # Of the save before; 0 in the steps that follow.
            blocked[-1] += time.perf_counter() - began
        optimizer.step()
        optimizer.zero_grad()

    result: dict[str, Any] = {"state_bytes": state_bytes}
    if action == "load":
        if name != "ours":
            # Peers load into state that exists; the time for making it is not theirs.
            train_step()
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
