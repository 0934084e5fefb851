"""One rank of a training whose model is sharded over all ranks, started through torchrun: `train`, or `load`.

The model is sharded by FSDP2, by DeepSpeed's ZeRO-3 for a method that ends with `zero`, or by nothing for `ours whole`.
Rank 0 prints the result.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from library.methods import Dcp, Decoder, Method, Ours, loss_of, state_bytes
from library.orders import carry_out
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


class DcpSharded(Dcp):
    """Of sharded state, which it also loads."""

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, step: int) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        state = self.state()
        load(state, checkpoint_id=str(self.folder / str(step)))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class DeepSpeed(Method):
    """`DeepSpeedEngine.save_checkpoint`, which returns when all is written."""

    def save(self, step: int) -> None:
        self.model.save_checkpoint(str(self.folder), tag=str(step))


METHODS: dict[str, Callable[..., Method]] = {
    "none": Method,
    "none zero": Method,
    "dcp": functools.partial(DcpSharded, process=True, shared_memory=True, async_staging=True),
    # DCP's own choices: training waits until the state was copied, and the copy was sent.
    "dcp plain": functools.partial(DcpSharded, process=True),
    "deepspeed zero": DeepSpeed,
    "ours": Ours,
    "ours zero": Ours,
    "ours whole": Ours,
}


def sharded(model: Decoder, name: str) -> tuple[Any, Any]:
    """Return DeepSpeed's engine, if it shards the model, and the optimizer."""
    if not name.endswith("zero"):
        # If not sharded: all ranks draw the same tokens, so that the replicas are equal without DDP.
        if name != "ours whole":
            for block in model.layers.children():
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


class Training:
    """A training by one method."""

    def __init__(self, name: str, folder: str, width: int, layers: int) -> None:
        model = Decoder(width, nn.Sequential(*(Block(width) for _ in range(layers))), _VOCABULARY)
        self.state_bytes = state_bytes(model)
        self.engine, self.optimizer = sharded(model, name)
        self.model = self.engine or model
        self.method = METHODS[name](self.model, self.optimizer, folder)

    def step(self, step: int) -> None:
        loss = loss_of(self.model, _TOKENS, _VOCABULARY)
        self.engine.backward(loss) if self.engine is not None else torch.autograd.backward(loss)
        self.method.timed_wait()
        if self.engine is not None:
            self.engine.step()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.method.after_step(step)

    def save_and_wait(self, step: int) -> float:
        """Make a step; return the seconds of its save until it is durable."""
        self.step(step)
        dist.barrier()
        began = time.perf_counter()
        self.method.timed_save(step)
        self.method.finish()
        dist.barrier()
        return time.perf_counter() - began

    def train(self, steps: int, save_every: int) -> dict[str, Any]:
        # Allocates gradients and moments, and whatever a method starts at its first save.
        self.save_and_wait(1)
        self.method.blocked = []
        began = time.perf_counter()
        for step in range(2, steps + 1):
            self.step(step)
            if step % save_every == 0:
                self.method.timed_save(step)
        total_s = time.perf_counter() - began
        self.method.finish()
        blocked = list(self.method.blocked)
        return {"total_s": total_s, "blocked_s": blocked, "durable_s": self.save_and_wait(steps + 1)}

    def load(self, step: int) -> dict[str, Any]:
        began = time.perf_counter()
        if isinstance(self.method, Ours):
            # Under `runner start` the agent is there before the ranks are. Asking for it starts it.
            _ = self.method.manager._node.connection
        ready_s = time.perf_counter() - began
        dist.barrier()
        began = time.perf_counter()
        if isinstance(self.method, Ours):
            found = self.method.resume()
            assert found == step, (found, step)
        elif isinstance(self.method, DcpSharded):
            self.method.load(step)
        dist.barrier()
        return {"ready_s": ready_s, "load_s": time.perf_counter() - began}


def measure(action: str, method: str, folder: str, steps: int, save_every: int, width: int, layers: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # DCP's process needs a group for each kind of device that it may find.
    dist.init_process_group("cpu:gloo")
    training = Training(method, folder, width, layers)
    result = training.load(steps) if action == "load" else training.train(steps, save_every)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, result)
    if dist.get_rank() == 0:
        if "blocked_s" in result:
            # A step waits for the slowest rank.
            of_ranks = zip(*(one["blocked_s"] for one in everyone), strict=True)
            result["blocked_s"] = [max(values) for values in of_ranks]
        print("RESULT " + json.dumps({"state_bytes": training.state_bytes, **result}), flush=True)
    dist.barrier()
    training.method.close()
    dist.barrier()
    # An orderly exit would wait for threads and processes that peers leave; the driver ends them.
    os._exit(0)


if __name__ == "__main__":
    carry_out({action: functools.partial(measure, action) for action in ("train", "load")})
