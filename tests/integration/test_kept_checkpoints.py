"""A training that lives never removes what a user has said to keep meanwhile, and one resumes from a copy."""

from __future__ import annotations

import json
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
manager = CheckpointManager(sys.argv[1], model=model, optimizer=optimizer, save_steps=5, keep_last=1)
for step in range(manager.resume(), int(sys.argv[2])):
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
    training = subprocess.Popen(
        [sys.executable, "train.py", "out", "30"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
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


def test_a_training_resumes_from_a_copy(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "continue").touch()
    train(tmp_path, "whole", "20")
    train(tmp_path, "out", "10")
    source, copy = tmp_path / "out" / "checkpoint-10", tmp_path / "copy"
    assert run_command("checkpoints", "copy", str(source), str(copy)).returncode == 0
    assert "resumed from step 10" in train(tmp_path, "copy", "20")
    differ = run_command("checkpoints", "diff", str(tmp_path / "whole"), str(tmp_path / "copy"), "--json")
    files = {json.loads(line)["file"] for line in differ.stdout.splitlines()}
    # Python's own generator is seeded by nobody.
    assert files <= {"rng_state.pth", "step_record_0.bin"}, differ.stdout


def train(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "train.py", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr
