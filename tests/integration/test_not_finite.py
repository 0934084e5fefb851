"""A bare loop whose state becomes infinite: its good checkpoints stay, and it does not end as if all were well."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from infra.torchrun import torchrun
from integration.support import RUNNER

from checkpointing.format.layout import NOT_FINITE_FOLDER
from checkpointing.storage import open_storage

LOOP = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from checkpointing import CheckpointManager
if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
if "fsdp" in sys.argv:
    fully_shard(model)
elif dist.is_initialized():
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
location = os.environ.get("LOCATION", "run")
manager = CheckpointManager(location, model=model, optimizer=optimizer, save_steps=2, keep_last=1)
for step in range(manager.resume(), 12):
    optimizer.zero_grad()
    model(torch.ones(4, 64)).square().mean().backward()
    if step == 6:
        for parameter in model.parameters():
            parameter.grad.fill_(torch.inf)
    optimizer.step()
    manager.step(step + 1)
manager.close()
"""


@pytest.mark.parametrize("ranks", [0, 1, pytest.param(3, marks=pytest.mark.soak)])
def test_one_step_with_infinite_gradients(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    options = [f"--nproc-per-node={ranks}", "--output-dir=run", "--max-restarts=4"]
    command = [*RUNNER, "start", *options, "train.py"] if ranks else [sys.executable, "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert ended.returncode == (78 if ranks else 1), ended.stderr[-3000:]
    # Steps are short, so that not each makes a snapshot.
    found = re.search(r"NonFinite: the state of step (\d+) is not finite", ended.stdout + ended.stderr)
    assert found and int(found[1]) > 6, ended.stderr[-3000:]
    folder = tmp_path / "run" / ("checkpoints" if ranks else "")
    (last,) = open_storage(str(folder)).steps()
    # A save for which there is no memory yet is made up for at the next step.
    assert last <= 6
    kept = open_storage(str(folder / NOT_FINITE_FOLDER))
    (step,) = kept.steps()
    assert step > 6 and kept.read_manifest(step).not_finite
    assert subprocess.run([*RUNNER, "checkpoints", "verify", str(folder)]).returncode == 0


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.soak)])
def test_on_two_nodes_nobody_commits_it(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    folder = tmp_path / "run"
    ended = torchrun(tmp_path / "train.py", strategy, ranks=1, nodes=2, environment={"LOCATION": str(folder)})
    assert all(ended.codes) and "NonFinite: the state of step" in ended.stderr, ended.stderr[-3000:]
    (last,) = open_storage(str(folder)).steps()
    # A save for which there is no memory yet is made up for at the next step.
    assert last <= 6
    # Of what is spread over nodes, none has enough for a post-mortem; otherwise an agent of the script's own may end
    # before the last rank has handed over its share.
    kept = open_storage(str(folder / NOT_FINITE_FOLDER))
    assert len(kept.steps()) <= (strategy == "ddp")
    assert all(kept.read_manifest(step).not_finite for step in kept.steps())
