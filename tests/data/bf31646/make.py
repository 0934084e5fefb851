"""Make the runs that this folder keeps, with the code of commit bf31646.

    git worktree add /tmp/old bf31646
    cd "$(mktemp -d)" && PYTHONPATH=/tmp/old python /path/to/make.py

The first run, `preempted`, is the bundled job with the smallest model: a rank is killed after step 24, and the runner
gets SIGTERM after step 32, so that the run is unfinished and can be resumed. The second, `failed`, is a script that
causes one failure of each class that a script can cause; only its journal, its restart state and their copies next to
the checkpoints are kept. Both are packed into `runs.tar.xz`, without caches, logs and trackers' files. `answers.json`
holds the output of the old `runner status --json` and `runner simulate --from` for them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

JOB = """\
output_dir: preempted
model:
  vocab_size: 300
  config:
    hidden_size: 16
    intermediate_size: 32
    num_hidden_layers: 1
    num_attention_heads: 2
    num_key_value_heads: 1
    max_position_embeddings: 128
    attention_dropout: 0.1
data:
  validation_share: 0.1
  max_rows: 200
trainer:
  max_steps: 60
  per_device_train_batch_size: 2
  learning_rate: 1.0e-3
  max_length: 64
  logging_steps: 2
  save_steps: 10
  save_total_limit: 2
  eval_strategy: steps
  eval_steps: 10
  seed: 7
checkpoint:
  snapshot_steps: 5
restart:
  hang_timeout_s: 30
"""

SCRIPT = """\
import os, time
import torch
from datasets import Dataset
from transformers import SmolLM3Config, SmolLM3ForCausalLM, Trainer, TrainerCallback, TrainingArguments
from checkpointing.transformers import resilient

RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["CHECKPOINT_ATTEMPT"])

class Trouble(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        time.sleep(0.3 if ATTEMPT == 6 else 0.05)
        step = state.global_step
        if step == 7 and RANK == 1 and args.per_device_train_batch_size == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if step == 18 and ATTEMPT == 4 and RANK == 0:
            time.sleep(10_000)
        if step == 23 and ATTEMPT == 5 and RANK == 1:
            raise RuntimeError("an error in mid-training")

compute_loss = Trainer.compute_loss
def spoiled(self, *args, **kwargs):
    loss = compute_loss(self, *args, **kwargs)
    return loss * float("nan") if self.model.training and self.state.global_step == 11 else loss
Trainer.compute_loss = spoiled

torch.manual_seed(0)
model = SmolLM3ForCausalLM(SmolLM3Config(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2))
rows = Dataset.from_dict({"input_ids": torch.randint(3, 64, (96, 16)).tolist()})
rows = rows.map(lambda row: {"labels": row["input_ids"]})
args = TrainingArguments(
    "unused", max_steps=40, per_device_train_batch_size=4, save_steps=10, use_cpu=True, report_to="none",
    disable_tqdm=True, logging_steps=5, dataloader_pin_memory=False)
trainer = resilient(Trainer(model=model, args=args, train_dataset=rows), snapshot_steps=5)
trainer.add_callback(Trouble())
trainer.train()
"""

RUNNER = [sys.executable, "-c", "import sys; from runner.cli import main; sys.argv[0] = 'runner'; main()"]
Event = dict[str, Any]
LEFT_OUT = {"cache", "logs", "trainer", "tmp"}


class Job:
    """One `runner start`, watched by its journal."""

    def __init__(self, folder: str, *arguments: str) -> None:
        self.journal = Path(folder, "journal.jsonl")
        command = [*RUNNER, "start", "--output-dir", folder, "--nproc-per-node", "2", *arguments]
        self.process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def wait_for(self, found: Callable[[list[Event]], Any]) -> list[Event]:
        """Return the journal's events once `found` is true of them."""
        while self.process.poll() is None:
            events = []
            if self.journal.exists():
                whole = self.journal.read_text().rpartition("\n")[0]
                events = [json.loads(line) for line in whole.splitlines()]
            if found(events):
                return events
            time.sleep(0.02)
        raise SystemExit(f"the run ended too early, with exit code {self.process.returncode}")


def reported(name: str, attempt: int, step: int) -> Callable[[list[Event]], bool]:
    def found(events: list[Event]) -> bool:
        return any(e["event"] == name and e["attempt"] == attempt and e["step"] >= step for e in events)

    return found


def preempted() -> None:
    Path("job.yaml").write_text(JOB)
    job = Job("preempted", "--config", "job.yaml")
    events = job.wait_for(reported("log", 1, 24))
    victim = next(e["pid"] for e in events if e["event"] == "rank_started" and e["rank"] == 1)
    os.kill(victim, signal.SIGKILL)
    job.wait_for(reported("log", 2, 32))
    job.process.terminate()
    assert job.process.wait() == 75


def failed() -> None:
    Path("train.py").write_text(SCRIPT)
    options = ["--set", "checkpoint.location=failed-checkpoints", "--set", "restart.hang_timeout_s=6", "train.py"]
    job = Job("failed", *options)
    job.wait_for(reported("committed", 6, 30))
    # The next start has to find that this runner was lost.
    job.process.kill()
    job.process.wait()
    time.sleep(10)
    assert Job("failed", *options).process.wait() == 0


def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """What goes into the archive: no caches, and of the second run no checkpoints."""
    path = Path(member.name)
    if LEFT_OUT & set(path.parts) or path.match("failed-checkpoints/checkpoint-*"):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def answer(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([*RUNNER, *arguments, "--json"], stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    preempted()
    failed()
    answers = {
        name: {
            "status": answer("status", name),
            "scenario": answer("simulate", "--from", name, "--runs", "20")["scenario"],
        }
        for name in ("preempted", "failed")
    }
    Path("answers.json").write_text(json.dumps(answers, indent=1) + "\n")
    with tarfile.open("runs.tar.xz", "w:xz") as archive:
        for name in ("job.yaml", "train.py", "preempted", "failed", "failed-checkpoints"):
            archive.add(name, filter=kept)
    print(f"runs.tar.xz: {Path('runs.tar.xz').stat().st_size} bytes")


if __name__ == "__main__":
    main()
