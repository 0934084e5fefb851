"""Two ranks, each on a device, that train one small model; the worker and what starts it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from infra.torchrun import Ended, torchrun

# What is printed where ranks have drifted apart.
DRIFT = r"step 6: the 2 ranks hold different values in 1 of \d+ tensors, first in 1.weight"
_STEPS = {"whole": 12}


def run(case: str, folder: Path, devices: Sequence[str]) -> Ended:
    """Six steps, from the newest checkpoint on; `whole` makes twelve, in `drift` and `layout` ranks differ."""
    if not devices[0].startswith("cuda"):
        return torchrun(Path(__file__), case, folder, *devices, ranks=2)
    # What is forked has no use of a GPU that was looked for before.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [*command, __file__, case, str(folder), *devices]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, env=environment)
    return Ended((done.returncode,), done.stdout, done.stderr)


def final(folder: Path) -> dict[str, torch.Tensor]:
    """The weights at the end of a run."""
    state: dict[str, torch.Tensor] = torch.load(folder / "final.pt", weights_only=True)
    return state


def are_equal(one: Path, other: Path) -> bool:
    """Two runs have ended in the same bits."""
    left, right = final(one), final(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def _broadcast_through_host() -> None:
    """Have restored states brought by broadcasts, also where no process group moves what is on these devices."""
    import torch.distributed as dist

    from checkpointing.process import ranks

    def through_host(tensor: torch.Tensor, owner: int) -> None:
        on_host = tensor.cpu()
        dist.broadcast(on_host, owner)
        tensor.copy_(on_host)
        print(f"rank {dist.get_rank()} has {tensor.nbytes} bytes from {owner}", flush=True)

    ranks._SMALL_BYTES = 1024
    made: Any = ranks.Ranks
    made.can_share_copies = lambda *_: True
    made.to_device = functools.partialmethod(made.to_device, broadcast=through_host)


def main() -> None:
    import torch.distributed as dist

    from checkpointing import CheckpointManager

    case, folder, *devices = sys.argv[1:]
    if case == "broadcast":
        _broadcast_through_host()
    if devices[0].startswith("sim"):
        import second_device

        second_device.load().set_delay_us(2000)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    on = torch.device(devices[rank])
    torch.accelerator.set_device_index(on.index)
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to(on)
    # Neither fused nor capturable: `step` is on the host.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True, amsgrad=case == "layout" and rank == 1)
    manager = CheckpointManager(folder, model=model, optimizer=optimizer, snapshot_steps=1, save_steps=3)
    start = manager.resume()
    for step in range(start + 1, start + 1 + _STEPS.get(case, 6)):
        torch.manual_seed(step)
        model(torch.randn(4, 64).to(on)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if case == "drift" and step == 6 and rank == 1:
            with torch.no_grad():
                list(model.parameters())[2][3, 7] += 1e-3
        manager.step(step)
    manager.close()
    if rank == 0:
        torch.save({name: tensor.cpu() for name, tensor in model.state_dict().items()}, Path(folder, "final.pt"))


if __name__ == "__main__":
    main()
