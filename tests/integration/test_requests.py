"""A run that is asked for checkpoints and for its end while it trains, by all the ways there are."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from integration.support import RUNNER

from checkpointing.agent.events import Committed, Event
from runner.journal.events import RankStarted, RunStarted, SaveRequested
from runner.journal.journal import read_journal

LOOP = """
import os, time, torch
from checkpointing import CheckpointManager
torch.distributed.init_process_group("gloo")
inner = torch.nn.Linear(4, 1)
model = torch.nn.parallel.DistributedDataParallel(inner)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
manager = CheckpointManager("checkpoints", model=inner, optimizer=optimizer, save_steps=1_000_000)
for step in range(manager.resume(), 100_000):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
    print("end of", step + 1, flush=True)
    manager.step(step + 1)
manager.close()
"""
TRAINER = """
import time, torch
from transformers import Trainer, TrainerCallback, TrainingArguments
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)
    def forward(self, x, labels=None):
        time.sleep(0.02)
        print("a forward pass", flush=True)
        return {"loss": (self.inner(x) - labels).square().mean()}
rows = [{"x": [1.0] * 4, "labels": [0.0]}] * 64
arguments = TrainingArguments("out", max_steps=100_000, use_cpu=True, report_to="none", disable_tqdm=True,
    save_strategy="no")
Trainer(model=Model(), args=arguments, train_dataset=rows).train()
"""


def events(folder: Path, kind: type[Event]) -> list[Any]:
    return [entry.event for entry in read_journal(folder / "run" / "journal.jsonl") if isinstance(entry.event, kind)]


def ask(folder: Path, *arguments: str) -> str:
    command = [*RUNNER, *arguments[:1], "run", *arguments[1:]]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("program", "ranks"), [(LOOP, 1), (LOOP, 2), (TRAINER, 3)], ids=["1", "2", "trainer-3"])
def test_a_run_saves_and_stops_when_it_is_asked_to(program: str, ranks: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program)
    command = [*RUNNER, "start", "--output-dir", "run", "--nproc-per-node", str(ranks), "train.py"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
    try:
        while not events(tmp_path, RankStarted):
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        # While the ranks import: the request waits for the first step.
        said = ask(tmp_path, "save", "--wait")
        first = int(re.findall(r"checkpoint-(\d+) is committed", said)[0])
        assert (tmp_path / "run" / "checkpoints" / f"checkpoint-{first}").is_dir() or "train" in said

        def by(send: Any) -> None:
            asked, committed = len(events(tmp_path, SaveRequested)), len(events(tmp_path, Committed))
            send()
            while len(events(tmp_path, Committed)) == committed:
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.05)
            assert len(events(tmp_path, SaveRequested)) - asked in (0, 1)

        by(lambda: (tmp_path / "run" / "requests" / "save").touch())
        by(lambda: process.send_signal(signal.SIGUSR2))
        # Of any rank, or of all processes at once, as some schedulers do it.
        started = sorted(events(tmp_path, RankStarted), key=lambda event: event.rank)
        ranks_of_run = [event.pid for event in started]
        by(lambda: os.kill(ranks_of_run[-1], signal.SIGUSR2))
        by(lambda: os.killpg(process.pid, signal.SIGUSR2))
        assert len(ranks_of_run) == ranks == len(events(tmp_path, RankStarted)), "no rank was lost"
        printed = ask(tmp_path, "logs", "--rank", str(ranks - 1))
        assert ("\na forward pass\n" if program is TRAINER else "end of 1\n") in printed
        status = subprocess.run([*RUNNER, "status", "run"], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert re.search(rf"rank {ranks - 1}\s+{ranks_of_run[-1]}", status.stdout), status.stdout
        assert "preempted" in ask(tmp_path, "stop", "--wait")
        assert process.wait(60) == 75
    finally:
        if process.poll() is None:
            process.kill()
    assert "stop requested (runner stop)" in (tmp_path / "log").read_text()
    # A file that comes late is no request to the next session.
    (tmp_path / "run" / "requests" / "stop").touch()
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
    try:
        while len(events(tmp_path, RankStarted)) < 2 * ranks:
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        assert len(events(tmp_path, RunStarted)) == 2
    finally:
        process.terminate()
        process.wait(120)


def test_without_the_runner_a_signal_to_one_rank_is_enough(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
    try:
        while "end of 3" not in (tmp_path / "log").read_text():
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        # They name their parent in /proc.
        children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        ranks = [pid for pid in children if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
        os.kill(ranks[0], signal.SIGUSR2)
        while not list((tmp_path / "checkpoints").glob("checkpoint-*")):
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
    finally:
        process.terminate()
        process.wait(120)
