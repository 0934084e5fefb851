"""Two ranks, each on a device of its own: shares of one file, replicas compared on the device, and what differs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

pytestmark = pytest.mark.device

SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import os, torch, torch.distributed as dist, second_device
from checkpointing import CheckpointManager

case, folder = sys.argv[1:]
sim = second_device.load()
sim.set_delay_us(2000)
dist.init_process_group("gloo")
rank = dist.get_rank()
sim.set_device(rank)
torch.manual_seed(5)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to(f"sim:{{rank}}")
# Neither fused nor capturable: `step` is on the host.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True, amsgrad=case == "layout" and rank == 1)
manager = CheckpointManager(folder, model=model, optimizer=optimizer, snapshot_steps=1, save_steps=3)
start = manager.resume()
torch.manual_seed(start)
for step in range(start + 1, start + 7):
    model(torch.randn(4, 64).to(f"sim:{{rank}}")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if case == "drift" and step == 5 and rank == 1:
        with torch.no_grad():
            model[1].weight[3, 7] += 1e-3
    manager.step(step)
manager.close()
if rank == 0:
    torch.save({{name: tensor.cpu() for name, tensor in model.state_dict().items()}}, folder + "/final.pt")
"""


def run(case: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    return subprocess.run(
        [*command, case, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_ranks_write_shares_of_one_file_and_resume(sim: Any, tmp_path: Path) -> None:
    for last in (6, 12):
        result = run("plain", tmp_path)
        assert result.returncode == 0, result.stderr
        saved = safetensors.torch.load_file(tmp_path / "run" / f"checkpoint-{last}" / "model.safetensors")
        final = torch.load(tmp_path / "run" / "final.pt", weights_only=True)
        assert all(torch.equal(saved[name], final[name]) for name in final)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("drift", r"step 5: the 2 ranks hold different values in 1 of \d+ tensors, first in 1.weight"),
        ("layout", "step 1: the 2 ranks hold different values in the shapes or names of what optimizer.pt holds"),
    ],
)
def test_ranks_that_differ_make_no_checkpoint(case: str, told: str, sim: Any, tmp_path: Path) -> None:
    result = run(case, tmp_path)
    assert result.returncode != 0
    assert "ReplicasDrifted" in result.stderr and re.search(told, result.stderr), result.stderr
    steps = [int(path.name.rpartition("-")[2]) for path in (tmp_path / "run").glob("checkpoint-*")]
    # What was whole before that may be committed.
    assert max(steps, default=0) <= 4
