"""Aim, read back by its own SDK: one run for all attempts, and training that does not mind when it is away."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from integration.support import (
    SAVE_STEPS,
    SHORT_JOB,
    TOTAL_STEPS,
    Run,
    loss_curve,
    wait_for_commit,
    wait_for_events,
    wait_until,
)

# In a process of its own: Aim holds its databases open until the process ends.
READ = """
    import json, sys
    from aim import Repo, Run
    found, repo = [], Repo.from_path(sys.argv[1])
    for name in repo.list_all_runs():
        run = Run(name, repo=repo, capture_terminal_logs=False, force_resume=True, system_tracking_interval=None)
        points = {}
        for metric in run.metrics():
            frame = metric.dataframe()
            context = metric.context.to_dict().get("subset", "")
            points[f"{context}.{metric.name}".strip(".")] = [frame["step"].tolist(), frame["value"].tolist()]
        records = [record for record in run.get_log_records().data.values_list()[0] if record]
        logs = [str(record.json()["message"]) for record in records]
        found.append({"about": run["runner"], "hparams": run["hparams"], "points": points, "logs": logs})
    print(json.dumps(found, default=str))
"""


def read(repo: Path) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(READ), str(repo)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_three_kills_make_one_run_and_each_step_is_tracked_once(tmp_path: Path) -> None:
    """The last life is on another machine: it has nothing but the checkpoints."""
    repo, location = tmp_path / "aim", tmp_path / "checkpoints"
    settings = [f"tracking.aim_repo={repo}", f"checkpoint.location={location}", "checkpoint.snapshot_steps=null"]
    settings += ["restart.hang_timeout_s=600"]
    places = [part for setting in settings for part in ("--set", setting)]
    run = Run(tmp_path / "run", *SHORT_JOB, *places)
    # Each attempt stands still a few steps after its commit, until it is killed.
    run.start(CHECKPOINT_FAILPOINTS="training.step=hang@28")
    # A repository that was killed while Aim made it is never usable again.
    wait_until(run, (repo / ".aim" / "VERSION").exists)
    for attempt in (1, 2):
        wait_for_commit(run, attempt * SAVE_STEPS)
        run.wait_for_step(attempt * SAVE_STEPS + 5, attempt)
        os.kill(run.rank_pid(0), signal.SIGKILL)
        wait_for_events(run, "attempt_ended", attempt)
    wait_for_commit(run, 3 * SAVE_STEPS)
    run.signal(signal.SIGKILL)
    run.finish()
    other = Run(tmp_path / "other", *SHORT_JOB, *places).start()
    assert other.finish() == 0, other.output
    (found,) = read(repo)
    newest = tmp_path / "checkpoints" / f"checkpoint-{TOTAL_STEPS}"
    steps, values = found["points"]["loss"]
    assert sorted(zip(steps, values, strict=True)) == loss_curve(newest)
    assert len(found["points"]["perplexity"][0]) == len(steps)
    assert {"tokens_per_s", "data_wait_s", "peak_memory_gb", "learning_rate", "grad_norm"} <= found["points"].keys()
    assert min(found["points"]["checkpoint_stall_s"][1]) >= 0
    # As far as somebody lived to tell: of the third attempt nobody did.
    (first, second), (_, resumed, _) = (
        [event["step"] for event in run.events(name)] for name in ("attempt_ended", "training_started")
    )
    (last,) = other.events("training_started")
    lost = (first - resumed) + max(second - last["step"], 0)
    assert dict(zip(*found["points"]["lost_steps"], strict=True))[TOTAL_STEPS] == lost > 0
    assert any(name.startswith("__system__") for name in found["points"])
    assert found["about"]["attempts"] == 4 and found["hparams"]["max_steps"] == -1
    assert any("attempt 4 resumed from step" in line for line in found["logs"])
    assert any(f"checkpoint of step {TOTAL_STEPS}" in line for line in found["logs"])


@pytest.mark.soak
def test_training_goes_on_without_a_repository(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        (tmp_path / "file").touch()
        places = {"silent": f"aim://127.0.0.1:{silent.getsockname()[1]}", "no folder": str(tmp_path / "file" / "aim")}
        for name, place in places.items():
            job = ["--set", "trainer.max_steps=6", "--set", f"tracking.aim_repo={place}"]
            run = Run(tmp_path / name, *SHORT_JOB, *job).start()
            assert run.finish() == 0, run.output
            log = next((run.folder / "logs").glob("attempt-1/rank0/stderr.log")).read_text()
            assert "training continues" in log, log
            assert not run.leftovers()
