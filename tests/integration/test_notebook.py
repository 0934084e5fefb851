"""`from runner import start` in real kernels: the recorded notebook, an interrupt, and a kernel that is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from infra.parts import require
from integration.support import troubled

NOTEBOOK = Path(__file__).parents[2] / "docs" / "examples" / "notebook.ipynb"


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    journal = folder / "journal.jsonl"
    lines = journal.read_text().splitlines() if journal.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in found if event["event"] == name]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_recorded_notebook_runs(tmp_path: Path) -> None:
    require("notebook")
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, 4)
    recorded = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count and "state='failed'" not in str(cell.outputs) for cell in recorded)
    # Nothing of the training is in the kernel.
    asked = nbformat.v4.new_code_cell("import os, sys; print(os.getpid(), 'torch' in sys.modules)")
    notebook.cells.append(asked)
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "RunResult(exit_code=0, state='finished', reason='finished', step=40" in str(code[1].outputs)
    assert "('finished', 0)" in str(code[2].outputs) and "killed by SIGKILL" in str(code[3].outputs)
    pid, has_torch = code[-1].outputs[0].text.split()
    assert has_torch == "False"
    started = events(tmp_path / "runs" / "notebook", "rank_started")
    assert len(started) == 2 and int(pid) not in [event["pid"] for event in started]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_ends_with_its_last_state_when_the_kernel_is_interrupted_or_killed(
    is_killed: bool, tmp_path: Path
) -> None:
    require("notebook")
    from jupyter_client.manager import start_new_kernel

    [script] = troubled(tmp_path, crawl=10)
    manager, client = start_new_kernel(cwd=str(tmp_path), startup_timeout=200)
    try:
        client.execute("import os; print(os.getpid())")
        pid = next(int(m["content"]["text"]) for m in iter(client.get_iopub_msg, None) if m["msg_type"] == "stream")
        asked = client.execute(f"import runner; runner.start({script!r}, nproc_per_node=1, output_dir='run')")
        wait_for(lambda: events(tmp_path / "run", "log")[1:])
        if is_killed:
            os.kill(pid, signal.SIGKILL)
        else:
            manager.interrupt_kernel()
            reply = client.get_shell_msg(timeout=200)
            while reply["parent_header"]["msg_id"] != asked:
                reply = client.get_shell_msg(timeout=200)
            assert reply["content"]["ename"] == "KeyboardInterrupt", reply
        wait_for(lambda: events(tmp_path / "run", "run_ended"))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    (end,) = events(tmp_path / "run", "run_ended")
    assert (end["state"], end["exit_code"]) == ("preempted", 75)
    committed = [event["step"] for event in events(tmp_path / "run", "committed")]
    ended = events(tmp_path / "run", "attempt_ended")[-1]
    assert max(committed) == ended["step"] >= 10, (ended, committed, events(tmp_path / "run", "stop_requested"))
