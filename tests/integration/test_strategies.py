"""Every way to share a model among the ranks of a machine: killed, resumed in the same bits, and resumed in another."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from integration.support import state_hash

# By default test_sharded.py has a chain of four, and sharded jobs that are killed.
pytestmark = pytest.mark.soak

LOOP = """
import os, signal, sys, torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from checkpointing import CheckpointManager
from checkpointing.rank.sharding import gathered

folder, steps, strategy, last = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 5)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(5, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5)) for _ in range(2)
        )
        self.dropout = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + self.dropout(layer(hidden))
        return self.head(hidden)

model = trained = Model()
replica = rank
if "tp" in strategy:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    replica = mesh.get_local_rank("dp")
    plan = {f"layers.{n}.{m}": style() for n in range(2) for m, style in ((0, ColwiseParallel), (2, RowwiseParallel))}
    parallelize_module(model, mesh["tp"], plan)
if "checkpointing" in strategy:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, torch.nn.Sequential))
if "sdp" in strategy:
    shards = mesh["dp"] if "tp" in strategy else init_device_mesh("cpu", (size,))
    if strategy == "hsdp":
        shards = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=shards)
    fully_shard(model, mesh=shards)
if "compile" in strategy:
    for layer in model.layers:
        layer.compile()
if strategy == "ddp":
    trained = torch.nn.parallel.DistributedDataParallel(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
manager = CheckpointManager(folder, model=model, optimizer=optimizer, snapshot_steps=None)
start = manager.resume()
if start:
    # Element for element what the files hold.
    files = load_file(f"{folder}/checkpoint-{start}/model.safetensors")
    moments = torch.load(f"{folder}/checkpoint-{start}/optimizer.pt")["state"]
    held = {name: gathered(value.detach()) for name, value in model.state_dict().items()}
    for name, value in files.items():
        assert torch.equal(held[name], value), name
    own = optimizer.state_dict()["state"]
    assert own.keys() == moments.keys()
    for number, state in moments.items():
        for name, value in state.items():
            assert torch.equal(gathered(own[number][name]), value), (number, name)
    print(f"RESUMED {start}", flush=True)
for step in range(start, steps):
    tokens = (torch.arange(7)[None] * (step + 1) + replica) % 7
    torch.nn.functional.cross_entropy(trained(tokens)[0], tokens[0].roll(1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    manager.end_of_step(step + 1)
    manager.save(step + 1, step + 1, wait=True)
    if step + 1 == last:
        manager.wait_for_commit()
        os.kill(os.getpid(), signal.SIGKILL)
manager.wait_for_commit()
manager.close()
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Strategy:
    """A strategy of the loop, and the number of ranks for it."""

    name: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.name}-{self.ranks}"


FSDP_TP = Strategy("fsdp + tp", 4)
OTHERS = [
    Strategy("ddp", 2),
    Strategy("fsdp", 3),
    Strategy("fsdp, checkpointing", 2),
    Strategy("fsdp, compile", 2),
    Strategy("hsdp", 4),
    Strategy("tp", 2),
]


def train(folder: Path, strategy: Strategy, steps: int, *, last: int = 0) -> str:
    """Train up to a step; with `last`, all ranks are killed after that step. Returns what was printed."""
    path = folder / "loop.py"
    folder.mkdir(exist_ok=True)
    path.write_text(LOOP)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={strategy.ranks}"]
    command += [str(path), str(folder / "run"), str(steps), strategy.name, str(last)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert (result.returncode != 0) == (last > 0), result.stderr[-4000:]
    return result.stdout


@pytest.mark.parametrize("strategy", [FSDP_TP, *OTHERS], ids=str)
def test_a_killed_rank_costs_no_bit(strategy: Strategy, tmp_path: Path) -> None:
    train(tmp_path / "calm", strategy, 6)
    train(tmp_path / "killed", strategy, 6, last=4)
    assert "RESUMED 4" in train(tmp_path / "killed", strategy, 6)
    ends = [tmp_path / name / "run" / "checkpoint-6" for name in ("calm", "killed")]
    assert state_hash(ends[0]) == state_hash(ends[1])


def test_a_checkpoint_is_resumed_by_every_other_strategy(tmp_path: Path) -> None:
    """Each writes what the next one reads; all write the same format, so a chain is as good as every pair."""
    chain = [FSDP_TP, *OTHERS, FSDP_TP]
    for number, strategy in enumerate(chain):
        printed = train(tmp_path / "chain", strategy, number + 1)
        assert (f"RESUMED {number}" in printed) == (number > 0), (strategy, printed)
