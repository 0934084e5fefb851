"""The user's own script in place of the default job, and its failures."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from infra.ports import free_port
from integration.support import Run, script, state_hash, wait_for_commit, wait_until


@pytest.mark.soak
def test_a_plain_script_survives_a_kill_bit_for_bit(tmp_path: Path, untouched_script: Run) -> None:
    """Logs and saves do not fall together here, so the loss in the making is part of what must be restored.

    With dataloader workers, which change nothing in the data; test_snapshots.py does without.
    """
    run = Run(tmp_path / "run", script=script(tmp_path, num_workers=2, crawl=20)).start()
    wait_for_commit(run, 20)
    os.kill(run.rank_pid(0), signal.SIGKILL)
    assert run.finish() == 0, run.output
    assert len(run.events("attempt_started")) == 2
    assert state_hash(run.checkpoint(60)) == state_hash(untouched_script.checkpoint(60))
    for name in ("trainer_state.json", "rng_state_0.pth", "rng_state_1.pth", "loop_state_1.json"):
        assert (run.checkpoint(60) / name).read_bytes() == (untouched_script.checkpoint(60) / name).read_bytes(), name
    assert not run.leftovers()


@pytest.mark.soak
def test_the_same_script_under_plain_torchrun(tmp_path: Path, untouched_script: Run) -> None:
    """Library use: no supervisor; the manager starts its own agent, and resumes from the checkpoints that it finds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CHECKPOINT_LOCATION": str(tmp_path / "checkpoints")}
    held = {**environment, "CHECKPOINT_FAILPOINTS": "training.step=hang@25"}
    process = psutil.Popen([*command, *script(tmp_path)], env=held)
    deadline = time.monotonic() + 400
    while not (tmp_path / "checkpoints" / "checkpoint-20").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    # torchrun starts each rank in its own session.
    for victim in [*process.children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    process.wait()
    result = subprocess.run([*command, *script(tmp_path)], env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    assert state_hash(tmp_path / "checkpoints" / "checkpoint-60") == state_hash(untouched_script.checkpoint(60))


def test_a_missing_model_is_told_in_one_line(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "--set", "model.name_or_path=nobody/nothing").start(HF_HUB_OFFLINE="1")
    assert run.finish() == 78, run.output
    assert "nothing" in run.output and "Traceback" not in run.output
    # A missing model folder is found before anything is started.
    run = Run(tmp_path / "other", "--set", f"model.name_or_path={tmp_path}/nothing").start()
    assert run.finish() == 2, run.output
    assert "nothing' does not exist" in run.output and len(run.output.splitlines()) == 1


@pytest.mark.soak
def test_one_rank_and_cold_start(tmp_path: Path) -> None:
    options = ["--nproc-per-node", "1", "--cold"]
    run = Run(tmp_path / "run", *options, script=script(tmp_path)).start()
    assert run.finish() == 0, run.output
    assert (run.checkpoint(60) / "rng_state.pth").exists()


def test_a_script_with_its_own_answer_to_sigterm_is_asked_first(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        f"    open({str(tmp_path)!r} + '/saved-' + os.environ['RANK'], 'w').close()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        f"open({str(tmp_path)!r} + '/ready-' + os.environ['RANK'], 'w').close()\n"
        "time.sleep(600)\n"
    )
    run = Run(tmp_path / "run", script=[str(path)]).start()
    wait_until(run, lambda: all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)))
    run.signal(signal.SIGINT)
    # A script that handles the signal itself still ends as stopped, not as finished.
    assert run.finish() == 75, run.output
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()
    assert not run.leftovers()


@pytest.mark.soak
def test_two_nodes_on_one_machine_finish_together(tmp_path: Path) -> None:
    """The happy path of torchrun's options for several machines: one run, one committer."""
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--set", f"launch.peer_port={free_port()}"]
    options += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    lines = script(tmp_path)
    nodes = [Run(tmp_path / "run", *options, "--node-rank", str(node), script=lines).start() for node in (0, 1)]
    assert [node.finish() for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    assert (nodes[0].checkpoint(60) / "rng_state_1.pth").exists()
    assert (tmp_path / "run" / "node-1" / "journal.jsonl").exists()
