"""What a killed run leaves in /dev/shm."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
from integration.support import Run, wait_until

from runner.journal.run_directory import RunDirectory
from runner.system import processes

SCRIPT = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).touch()
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.05)
"""


def semaphores(run: Run) -> set[str]:
    mark = processes.mark(RunDirectory(str(run.folder)).run_id(), 0)
    return {path.name for path in Path("/dev/shm").glob(f"sem.{processes.semaphore_prefix(mark)}-*")}


def test_the_next_start_removes_its_predecessors_semaphores(tmp_path: Path) -> None:
    """A runner and all that it has started are killed at once, multiprocessing's resource tracker among them."""
    (tmp_path / "train.py").write_text(SCRIPT)
    script = [str(tmp_path / "train.py"), str(tmp_path / "there"), str(tmp_path / "end")]
    run = Run(tmp_path / "run", "--nproc-per-node", "1", script=script).start()
    wait_until(run, (tmp_path / "there").exists)
    assert run.process is not None
    runner = psutil.Process(run.process.pid)
    everyone = [runner, *runner.children(recursive=True)]
    for process in everyone:
        process.suspend()
    for process in everyone:
        os.kill(process.pid, signal.SIGKILL)
    run.finish()
    assert semaphores(run)
    (tmp_path / "end").touch()
    assert run.start().finish() == 0, run.output
    assert not semaphores(run)
