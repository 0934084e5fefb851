"""Loops whose ranks do not do the same at every step, for `test_loops.py`: CASE FOLDER [STEP to be killed at]"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from checkpointing import CheckpointManager

TOTAL = 12


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8)


def loss_of(model: Any, step: int) -> Any:
    generator = torch.Generator().manual_seed(7 * step + dist.get_rank())
    return (model(torch.randn(4, 8, generator=generator)) - 1).square().mean()


def die_at(step: int, killed: int) -> None:
    if step == killed and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def print_digest(model: torch.nn.Module) -> None:
    data = b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())
    if dist.get_rank() == 0:
        print("weights", hashlib.sha256(data).hexdigest(), flush=True)


def local_sgd(folder: str, killed: int) -> None:
    """Averaged every four steps; each rank has moments of its own."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator, own = Accelerator(cpu=True), network()
    model, optimizer = accelerator.prepare(own, torch.optim.AdamW(own.parameters(), lr=0.01))
    states = {"own_model": own, "own_optimizer": optimizer.optimizer}
    manager = CheckpointManager(
        folder, model=model, optimizer=optimizer, states=states, save_steps=3, check_replicas=False
    )
    start = manager.resume()
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4) as local:
        local.num_steps = start
        for step in range(start + 1, TOTAL + 1):
            time.sleep(0.02)
            accelerator.backward(loss_of(model, step))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            manager.step(step)
            die_at(step, killed)
    manager.close()
    print_digest(own)


def join(folder: str, _: int) -> None:
    """Rank 0 has more data than rank 1."""
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    manager = CheckpointManager(folder, model=model, optimizer=optimizer, save_steps=3)
    with model.join():
        for step in range(manager.resume() + 1, TOTAL + 1 if dist.get_rank() == 0 else 4):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.step(step)
    manager.close()


def spawned(rank: int, folder: str, store: str) -> None:
    """A rank that the script has made."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    manager = CheckpointManager(folder, model=model, optimizer=optimizer, save_steps=3)
    start = manager.resume()
    for step in range(start + 1, start + 5):
        loss: Any = model(torch.ones(2, 8)).sum()
        loss.backward()
        optimizer.step()
        manager.step(step)
    manager.close()
    print(f"{manager.rank} of {manager.world_size} from {start}", flush=True)
    dist.destroy_process_group()


def spawn(folder: str, _: int) -> None:
    """Ranks made by the script, in a process that was started as one."""
    with tempfile.TemporaryDirectory() as store:
        start_processes(spawned, (folder, f"{store}/store"), nprocs=2, start_method="spawn")  # type: ignore[no-untyped-call]


class Seen:
    """The steps that a rank has seen."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Divided(Seen):
    """Says how that of other ranks is divided."""

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        self.steps = sorted(step for state in states for step in state["steps"])[dist.get_rank() :: 2]


def own_states(folder: str, divides: int) -> None:
    """Each rank has an object of its own in `states`."""
    dist.init_process_group("gloo")
    model, seen = network(), Divided() if divides else Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    manager = CheckpointManager(folder, model=model, optimizer=optimizer, states={"seen": seen}, save_steps=2)
    start = manager.resume()
    print(f"{dist.get_rank()} {start} {seen.steps}", flush=True)
    for step in range(start + 1, start + 3):
        seen.steps.append(f"{dist.get_world_size()}.{dist.get_rank()}.{step}")
        loss: Any = model(torch.ones(2, 8)).sum()
        loss.backward()
        optimizer.step()
        manager.step(step)
    manager.close()


def main() -> None:
    case, folder, *killed = sys.argv[1:]
    {"local_sgd": local_sgd, "join": join, "spawn": spawn, "own_states": own_states}[case](
        folder, int(killed[0]) if killed else 0
    )


if __name__ == "__main__":
    main()
