"""A resumed run compares what it recomputes with what was computed before, and says what it has found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from integration.support import RUNNER

from checkpointing.agent.events import StepsRepeated
from checkpointing.storage import open_storage
from runner.journal.journal import read_journal

LOOP = """
import os, signal, sys, time, torch
import torch.distributed as dist
from checkpointing import CheckpointManager
if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    dist.init_process_group("gloo")
rank = int(os.environ.get("RANK", 0))
torch.manual_seed(rank)
model = torch.nn.Linear(64, 64)
whole = torch.nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(64, 64)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
manager = CheckpointManager("run", model=whole, optimizer=optimizer, save_steps=5, snapshot_steps=5)
hidden = 0
for step, batch in zip(range(manager.resume(), 20), manager.batches(loader)):
    hidden += 1
    noise = {"counter": hidden / 10, "unsteady": int.from_bytes(os.urandom(1)) / 100, "": 0.0}[sys.argv[1]]
    optimizer.zero_grad()
    loss = whole(batch + torch.randn(4, 64)).square().mean() * (1 + noise)
    loss.backward()
    optimizer.step()
    manager.step(step + 1, metrics={"loss": loss.item()})
    if step + 1 == int(sys.argv[2]) and rank == dist.is_initialized() and not os.path.exists("killed"):
        time.sleep(1)
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)
manager.close()
"""


def run(folder: Path, *arguments: str, ranks: int = 0, verify: str = "auto") -> subprocess.CompletedProcess[str]:
    """Run the loop, in plain Python without `ranks`, with what it forgets and the step after which it is killed."""
    (folder / "train.py").write_text(LOOP)
    options = [f"--nproc-per-node={ranks}", "--output-dir=out", f"--set=resume.verify={verify}", "--max-restarts=4"]
    command = [*RUNNER, "start", *options] if ranks else [sys.executable]
    return subprocess.run(
        [*command, "train.py", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "CHECKPOINT_RESUME_VERIFY": verify},
    )


def comparisons(folder: Path) -> list[StepsRepeated]:
    return [
        entry.event
        for entry in read_journal(folder / "out" / "journal.jsonl")
        if isinstance(entry.event, StepsRepeated)
    ]


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.soak)])
def test_what_is_computed_again_is_the_same_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    done = run(tmp_path, "", "13", ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = comparisons(tmp_path)
    assert (found.step, found.first, found.last, found.differs) == (10, 11, 13, [])
    assert "resumed from step 10; steps 11\u201313 repeated bit for bit" in done.stdout + done.stderr
    status = subprocess.run([*RUNNER, "status", "out"], cwd=tmp_path, capture_output=True, text=True)
    assert "1 of 1 resumes compared bit for bit" in " ".join(status.stdout.split()), status.stdout


def test_without_a_supervisor_the_next_process_compares(tmp_path: Path) -> None:
    assert run(tmp_path, "counter", "13").returncode < 0
    resumed = run(tmp_path, "counter", "13")
    assert resumed.returncode == 0, resumed.stderr
    assert "step 11 differs (rank 0): the loss" in resumed.stderr


def test_strict_ends_before_anything_of_a_step_that_differs_is_kept(tmp_path: Path) -> None:
    done = run(tmp_path, "counter", "13", ranks=2, verify="strict")
    assert done.returncode == 78, done.stdout + done.stderr
    assert all((found.last, found.differs[0]) == (10, "loss") for found in comparisons(tmp_path))
    assert open_storage(str(tmp_path / "out" / "checkpoints")).steps()[-1] == 10
    assert "RepetitionDiffers" in done.stdout + done.stderr


def test_strict_computes_a_step_again_where_none_was_lost(tmp_path: Path) -> None:
    done = run(tmp_path, "", "15", ranks=1, verify="strict")
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = comparisons(tmp_path)
    assert found.last == 15 and found.first in (6, 11) and not found.differs
    assert open_storage(str(tmp_path / "out" / "checkpoints")).steps()[-1] == 20


def test_strict_goes_on_with_a_job_that_differs_by_itself(tmp_path: Path) -> None:
    done = run(tmp_path, "unsteady", "13", ranks=1, verify="strict")
    assert done.returncode == 0, done.stdout + done.stderr
    found = comparisons(tmp_path)
    assert [one.by_itself for one in found] == [False, True], found
    assert "not deterministic by itself" in done.stdout + done.stderr
