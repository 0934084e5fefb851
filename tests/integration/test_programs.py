"""Programs that nobody has edited: modules and launchers survive kills, and what is not saved is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from integration.support import RUNNER, Run, wait_until
from safetensors.torch import load_file

from checkpointing.host.failpoints import FAILPOINTS_ENV, ONCE_ENV
from runner.journal.events import NothingSaved

TRAINER = """
import os, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class Careful(Trainer):
    def train(self, *args, **kwargs):
        print("training begins", flush=True)
        return super().train(*args, **kwargs)

if __name__ == "__main__":
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        attention_dropout=0.1))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (200, 16))]
    arguments = TrainingArguments(
        sys.argv[1], max_steps=20, save_steps=5, per_device_train_batch_size=2, report_to="none", use_cpu=True,
        disable_tqdm=True)
    trainer = Careful(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(sys.argv[1] + "/final")
"""
LOOP = """
import time
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10_000):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
"""


def package(folder: Path) -> None:
    (folder / "own").mkdir()
    (folder / "own" / "__init__.py").touch()
    (folder / "own" / "job.py").write_text(TRAINER)


def test_a_module_within_two_launchers_survives_kills_without_an_edit(tmp_path: Path) -> None:
    """What accelerate prepares, and has torchrun start, goes on in ranks that are there."""
    package(tmp_path)
    stock = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "own.job", "stock"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(stock, cwd=tmp_path, env=environment, check=True, capture_output=True)
    fired = tmp_path / "fired"
    fired.mkdir()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "runner", "start", "--output-dir", "run"),
            *("accelerate", "launch", "--num_processes", "2", "--mixed_precision", "no", "-m", "own.job", "ours"),
        ],
        cwd=tmp_path,
        env={**environment, FAILPOINTS_ENV: "training.step=kill@7,3", ONCE_ENV: str(fired)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(fired.iterdir())) == 2 and done.stdout.count("training begins") == 6
    one, other = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("stock", "ours"))
    assert one.keys() == other.keys() and all(bool((one[key] == other[key]).all()) for key in one)
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-20" / "manifest.json").exists()


def test_a_program_of_which_nothing_is_saved_is_named_while_it_trains(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    run = Run(tmp_path / "run", "--nproc-per-node", "1", script=[str(tmp_path / "loop.py")]).start()
    wait_until(run, lambda: bool(run.events(NothingSaved.name)))
    run.signal(signal.SIGTERM)
    assert run.finish() == 75
    assert [found["reason"] for found in run.events(NothingSaved.name)] == ["no Trainer and no CheckpointManager seen"]
    assert run.output.count("nothing is saved: no Trainer and no CheckpointManager seen") == 1
    assert "nothing of this program is saved so far: it is sent SIGTERM" in run.output
    assert "the ranks take a snapshot" not in run.output


def test_what_must_be_protected_and_is_not_ends_with_78(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    run = Run(tmp_path / "run", "--nproc-per-node", "1", "--resilient", "require", script=[str(tmp_path / "loop.py")])
    assert run.start().finish() == 78
    assert "nothing is saved: no Trainer and no CheckpointManager seen; pass --resilient auto" in run.output


def test_files_of_the_working_directory_are_not_run(tmp_path: Path) -> None:
    """The helpers imported `psutil.py` and `checkpointing.py` of a folder in which everybody may write."""
    everybodys, job = tmp_path / "everybodys", tmp_path / "job"
    everybodys.mkdir()
    job.mkdir()
    for name in ("runner", "checkpointing", "psutil", "xxhash", "torch", "numpy", "yaml", "fsspec"):
        (everybodys / f"{name}.py").write_text(
            f"open({str(tmp_path / 'was-run')!r}, 'a').write('{name} ')\nraise OSError"
        )
    (job / "train.py").write_text(TRAINER)
    done = subprocess.run(
        [*RUNNER, "start", "--nproc-per-node", "1", "--output-dir", str(job / "run"), str(job / "train.py"), "out"],
        cwd=everybodys,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "was-run").exists(), (tmp_path / "was-run").read_text()
    # What says what is run, and with which arguments, is for this user alone.
    readable = [path for path in (job / "run").rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert not [path.name for path in readable if path.name in ("job.json", "config.yaml", "journal.jsonl")]
    assert (job / "run" / "logs").stat().st_mode & 0o077 == 0
