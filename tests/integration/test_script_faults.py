"""Whatever is wrong with a user's script, the last lines on the console name it, and the exit code is the journal's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from integration.support import RUNNER

from runner.journal.journal import read_journal

WORKER = """
import os, torch
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): {fault}
list(torch.utils.data.DataLoader(Rows(), num_workers=1))
"""
HANG = """
import time, torch
from checkpointing import CheckpointManager
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
manager = CheckpointManager("checkpoints", model=model, optimizer=optimizer, save_steps=1000)
for step in range(manager.resume(), 100):
    optimizer.step()
    manager.step(step + 1)
    if step == 50: time.sleep(1000)
"""
LEFT = """
import os, sys, torch
from checkpointing import CheckpointManager
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
manager = CheckpointManager("checkpoints", model=model, optimizer=optimizer, save_steps=4)
for step in range(manager.resume(20), 20):
    optimizer.step()
    manager.step(step + 1)
    if step == 10: {leave}
"""
# The script, and what is to be read of it.
# The others, which are exceptions like "syntax", are in tests/unit/runner/training/test_failure_report.py.
FAULTS = {
    "interrupt": ("raise KeyboardInterrupt", "rank 0: KeyboardInterrupt; failed before the first step"),
    "segfault": ("import ctypes\nctypes.string_at(0)", "Fatal Python error: Segmentation fault"),
    "abort": ("import os\nos.abort()", "Fatal Python error: Aborted"),
    "bus error": ("import os\nos.kill(os.getpid(), 7)", "Fatal Python error: Bus error"),
    "killed": ("import os\nos.kill(os.getpid(), 9)", "rank 0 was killed by SIGKILL"),
    "bad argument": (
        "import argparse\nargparse.ArgumentParser().parse_args(['--oops'])",
        "unrecognized arguments: --oops",
    ),
    "exit with a text": ("raise SystemExit('no such task')", "rank 0: no such task"),
    "exit with a number": ("import sys\nsys.exit(4)", "rank 0 exited with status 4"),
    "exit at once": ("import os\nos._exit(3)", "rank 0 exited with status 3"),
    "exit in a thread": (
        "import os, threading, time\nthreading.Thread(target=os._exit, args=(5,)).start()\ntime.sleep(60)",
        "a thread of the program called os._exit(5)",
    ),
    "left in training": (LEFT.format(leave="sys.exit(0)"), "ended with status 0 at step 11 of 20, in the middle"),
    "left at once in training": (LEFT.format(leave="os._exit(0)"), "ended with status 0 at step 11 of 20"),
    "replaced": ("import os, sys\nos.execv(sys.executable, [sys.executable, __file__])", "would replace this rank"),
    "syntax": ("compile('def f(:', 'other.py', 'exec')", "SyntaxError: invalid syntax (other.py, line 1)"),
    "worker": (WORKER.format(fault="raise ValueError('bad row')"), "ValueError: bad row"),
    "hang": (HANG, "rank 0 hung: "),
    "long message": ("raise ValueError('x' * 100_000)", "ValueError: xxx"),
    "no message": (
        "class Mute(Exception):\n    def __str__(self): raise RuntimeError\nraise Mute",
        "rank 0: Mute",
    ),
    "closed streams": (
        "import sys\nsys.stdout.close()\nsys.stderr.close()\nraise ValueError('unheard')",
        "ValueError: unheard",
    ),
    "own excepthook": (
        "import sys\nsys.excepthook = lambda *_: None\nraise ValueError('held back')",
        "ValueError: held back",
    ),
}


# Each ends a rank in another way; the others are variants of these.
KINDS = ("segfault", "hang", "closed streams", "left in training")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in KINDS else [pytest.mark.soak]) for name in FAULTS]
)
def test_the_cause_is_in_the_last_lines(name: str, tmp_path: Path) -> None:
    text, cause = FAULTS[name]
    (tmp_path / "train.py").write_text(text + "\n")
    options = ["--nproc-per-node=1", "--output-dir=run", "--max-restarts=1", "--set=restart.hang_timeout_s=2"]
    ended = subprocess.run(
        [*RUNNER, "start", *options, "train.py"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    lines = ended.stdout.decode(errors="replace").splitlines()
    assert any(cause in line for line in lines[-5:]), "\n".join(lines[-20:])
    last = read_journal(tmp_path / "run" / "journal.jsonl")[-1].event.to_dict()
    assert ended.returncode == last["exit_code"] in (76, 78, 79)
