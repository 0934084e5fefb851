"""A rehearsal finds what a script keeps to itself, names it, and lets a sound script pass."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from integration.support import RUNNER

from checkpointing.commit.tiers import open_tiers
from checkpointing.host.environment import REHEARSAL_ENV
from runner.chaos.run_under_test import JobUnderTest
from runner.rehearse.disturbed_runs import MOMENTS, Findings, RehearsalFailed, RehearsedJob

LOOP = """
import sys, torch
from checkpointing import CheckpointManager
class WarmUp:
    def __init__(self): self.calls = 0
    def __call__(self, out):
        self.calls += 1
        return out.square().mean() * (min(1.0, self.calls / 20) if "hidden" in sys.argv else 1.0)
torch.manual_seed(0)
model, loss = torch.nn.Linear(16, 16), WarmUp()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.randn(20, 16), batch_size=4, shuffle=True)
manager = CheckpointManager("mine", model=model, optimizer=optimizer, save_steps=500)
for step, batch in zip(range(manager.resume(), 100_000), manager.batches(loader)):
    optimizer.zero_grad()
    value = loss(model(batch + torch.randn(4, 16)))
    value.backward()
    optimizer.step()
    if "fails" in sys.argv: raise RuntimeError("a bug")
    manager.step(step + 1, metrics={"loss": value})
manager.close()
open("after-training", "w")
"""


def rehearse(folder: Path, *arguments: str, moments: tuple[str, ...]) -> tuple[Findings, list[str]]:
    script, lines = folder / "train.py", list[str]()
    script.write_text(LOOP)
    options, program = ["--nproc-per-node", "1"], [str(script), *arguments]
    job = RehearsedJob(folder / "runs", JobUnderTest(options, program), steps=9, limit_s=300, report=lines.append)
    return job.rehearse([moment for moment in MOMENTS if moment.name in moments]), lines


def test_a_hidden_counter_is_found_and_named(tmp_path: Path) -> None:
    findings, _ = rehearse(tmp_path, "hidden", moments=("killed in a step",))
    assert not findings.is_safe and not findings.by_itself
    found = findings.outcomes[-1].first
    # The first step after the newest snapshot that was whole.
    assert found is not None and 1 < found[0] <= 8 and found[1] == ("loss", "parameters")
    assert findings.uncovered == ["loss.calls"]
    assert any("loss.calls" in hint for hint in findings.hints)


def test_a_sound_script_is_safe_and_nothing_of_the_users_is_touched(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    options = ["--nproc-per-node", "1", "--steps", "9", "--json"]
    done = subprocess.run([*RUNNER, "rehearse", *options, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["safe"] and found["deterministic"] and found["in_no_checkpoint"] == ["loss.calls"]
    reached = {run["name"]: run["reached"] for run in found["runs"]}
    assert [name for name, was in reached.items() if not was] == ["killed while it evaluates"]
    assert found["save_steps"] >= 1 and found["grace_s"] >= 15
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_an_attempt_that_resumes_at_the_last_step_makes_no_further_one(tmp_path: Path) -> None:
    """A rank killed between its last step and its end left one step more: found by `runner chaos --nodes 2`."""
    (tmp_path / "train.py").write_text(LOOP)
    environment = {**os.environ, REHEARSAL_ENV: f"6:3:{tmp_path / 'output'}"}
    for _ in range(2):
        subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, check=True)
        steps = open_tiers(str(tmp_path / "mine"), None).catalog.committed_steps()
        assert steps[-1] == 6 and not (tmp_path / "after-training").exists()


def test_a_script_that_fails_by_itself_is_no_matter_for_a_rehearsal(tmp_path: Path) -> None:
    with pytest.raises(RehearsalFailed, match=r"exits with 78 undisturbed(.|\n)*RuntimeError: a bug"):
        rehearse(tmp_path, "fails", moments=())


def test_a_rehearsal_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    """Its runs went on, and their folders stayed in the temporary folder."""
    (tmp_path / "train.py").write_text(LOOP)
    # Its path is short enough for sockets.
    with tempfile.TemporaryDirectory() as temporary:
        environment = {**os.environ, "TMPDIR": temporary}
        command = [*RUNNER, "rehearse", "--nproc-per-node", "1", "train.py"]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 300
            while not list(Path(temporary).glob("rehearse-*/undisturbed/journal.jsonl")):
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
            process.wait()
        assert not list(Path(temporary).iterdir())
    marked = f"TMPDIR={temporary}".encode()
    assert not [pid for pid in psutil.pids() if marked in environment_of(pid)]


def environment_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""
