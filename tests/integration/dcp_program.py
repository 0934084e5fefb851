"""A loop of FSDP2 with checkpoints of its own, by `torch.distributed.checkpoint`, as torchtitan has them.

dcp_program.py FOLDER STEPS [async]
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.fsdp import fully_shard

EVERY = 5


def main() -> None:
    folder, steps, is_async = sys.argv[1], int(sys.argv[2]), "async" in sys.argv[3:]
    dist.init_process_group("gloo")
    # Saves talk to each other while training does.
    group = dist.new_group(backend="gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    begun = newest(folder)
    if begun:
        state = state_of(model, optimizer, 0)
        load(state, checkpoint_id=f"{folder}/step-{begun}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        begun = state["step"]
        print(f"rank {dist.get_rank()} loaded step {begun}", flush=True)
    pending: Any = None
    for step in range(begun + 1, steps + 1):
        draw = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        model(torch.randn(8, 16, generator=draw)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            if pending is not None:
                pending.result()
            state, place = state_of(model, optimizer, step), f"{folder}/step-{step}"
            pending = async_save(state, checkpoint_id=place, process_group=group) if is_async else None
            if pending is None:
                save(state, checkpoint_id=place)
    if pending is not None:
        pending.result()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.full_tensor().detach().numpy().tobytes())  # type: ignore[attr-defined]
    if dist.get_rank() == 0:
        Path(f"{folder}.digest").write_text(digest.hexdigest())
    dist.destroy_process_group()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "step": step}


def newest(folder: str) -> int:
    """Return the newest step with an index, as torchtitan finds it."""
    found = [re.search(r"step-(\d+)", path.name) for path in Path(folder).glob("*") if (path / ".metadata").is_file()]
    return max((int(one[1]) for one in found if one), default=0)


if __name__ == "__main__":
    main()
