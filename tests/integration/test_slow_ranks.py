"""A rank that computes more slowly than the others is named while it does, though all ranks' steps take as long."""

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


def test_a_slow_rank_is_named_until_it_is_as_fast_as_the_others(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [*RUNNER, "start", "--output-dir", "run", "--nproc-per-node", "2", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [entry.event for entry in read_journal(tmp_path / "run" / "journal.jsonl")]
    first, second = [event for event in found if isinstance(event, SlowRanks)]
    assert (first.ranks, first.nodes) == ([1], [0]) and first.ratios[0] > 1.3
    assert second.ranks == []
    assert "rank 1 on node 0: " in done.stdout + done.stderr
