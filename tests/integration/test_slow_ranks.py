"""A rank that is slower than the others is named while it is, though all ranks' steps take as long."""

from __future__ import annotations

import subprocess
from pathlib import Path

from integration.support import RUNNER

from checkpointing.agent.events import SlowRanks
from runner.journal.journal import read_journal

SCRIPT = """
import os, time, torch
from checkpointing import CheckpointManager
torch.distributed.init_process_group("gloo")
rank, steps_done = int(os.environ["RANK"]), 0
class Slow(torch.nn.Linear):
    def forward(self, x):
        if rank == 1 and steps_done < 50: time.sleep(0.04)
        return super().forward(x)
inner = Slow(4, 1)
model = torch.nn.parallel.DistributedDataParallel(inner)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
manager = CheckpointManager("checkpoints", model=inner, optimizer=optimizer, save_steps=1000)
for step in range(manager.resume(), 110):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    steps_done += 1
    manager.step(step + 1)
manager.close()
"""

TRAINER = """
import os, time, torch
from transformers import Trainer, TrainerCallback, TrainingArguments
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)
    def forward(self, x, labels=None):
        return {"loss": (self.inner(x) - labels).square().mean()}
def collate(rows):
    if os.environ["RANK"] == "2": time.sleep(0.02)
    return {"x": torch.ones(len(rows), 4), "labels": torch.zeros(len(rows), 1)}
arguments = TrainingArguments("out", max_steps=110, use_cpu=True, report_to="none", disable_tqdm=True,
    save_strategy="no", remove_unused_columns=False, logging_steps=1)
Trainer(model=Model(), args=arguments, train_dataset=[{"x": 0}] * 6400, data_collator=collate).train()
"""


def slow_ranks_of(folder: Path) -> list[SlowRanks]:
    found = [entry.event for entry in read_journal(folder / "run" / "journal.jsonl")]
    return [event for event in found if isinstance(event, SlowRanks)]


def output_of(program: str, ranks: int, folder: Path) -> str:
    """Run a program to its end; return what the console shows."""
    (folder / "train.py").write_text(program)
    done = subprocess.run(
        [*RUNNER, "start", "--output-dir", "run", "--nproc-per-node", str(ranks), "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_rank_whose_data_is_slow_is_named(tmp_path: Path) -> None:
    """All wait for it before they compute, as the Trainer counts the tokens of all ranks."""
    output = output_of(TRAINER, 3, tmp_path)
    (event,) = slow_ranks_of(tmp_path)
    assert (event.ranks, event.between_steps) == ([2], [2]) and event.ratios[0] > 1.3
    assert "between steps" in output


def test_a_slow_rank_is_named_until_it_is_as_fast_as_the_others(tmp_path: Path) -> None:
    output = output_of(SCRIPT, 2, tmp_path)
    first, second = slow_ranks_of(tmp_path)
    assert (first.ranks, first.nodes) == ([1], [0]) and first.ratios[0] > 1.3
    assert second.ranks == []
    assert "rank 1 on node 0: " in output
