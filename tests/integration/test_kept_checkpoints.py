"""A training that lives never removes what a user has said to keep meanwhile."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from helpers.command_line import run_command

from checkpointing.storage import LocalStorage

SCRIPT = """
import sys, time
from pathlib import Path
import torch
from checkpointing import CheckpointManager

torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.AdamW(model.parameters())
manager = CheckpointManager("out", model=model, optimizer=optimizer, save_steps=5, keep_last=1)
for step in range(manager.resume(), 30):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    manager.step(step + 1)
    while step + 1 == 12 and not Path("continue").exists():
        time.sleep(0.05)
manager.close()
"""


def test_a_training_prunes_around_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    storage = LocalStorage(tmp_path / "out")
    training = subprocess.Popen([sys.executable, "train.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while storage.steps() != [10] and time.monotonic() < deadline:
            time.sleep(0.05)
        done = run_command("checkpoints", "keep", str(tmp_path / "out" / "checkpoint-10"), "--label", "good")
        assert done.returncode == 0, done.stderr
        (tmp_path / "continue").touch()
        _, errors = training.communicate(timeout=120)
    finally:
        training.kill()
        training.wait()
    assert training.returncode == 0, errors
    assert storage.steps() == [10, 30]
    listed = run_command("checkpoints", "list", str(tmp_path / "out")).stdout.splitlines()
    assert listed[-1].endswith("sizes ok (attempt 1), kept: good"), listed
