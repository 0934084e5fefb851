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

from integration.support import SHORT_JOB, TOTAL_STEPS, Run, loss_curve, wait_until

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
    repo = tmp_path / "aim"
    places = ["--set", f"tracking.aim_repo={repo}", "--set", f"checkpoint.location={tmp_path / 'checkpoints'}"]
    run = Run(tmp_path / "run", *SHORT_JOB, *places).start()
    for step in (15, 35):
        run.wait_for_step(step)
        os.kill(run.rank_pid(0), signal.SIGKILL)
        wait_until(run, lambda: len(run.events("attempt_ended")) == len(run.events("attempt_started")) - 1)
    run.wait_for_step(50)
    wait_until(run, lambda: any(event["step"] >= 40 for event in run.events("committed")))
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
    # As far as somebody lived to tell.
    ends = [event["step"] for event in run.events("attempt_ended")]
    starts = [event["step"] for event in run.events("training_started")][1:]
    lost = sum(end - start for end, start in zip(ends, starts, strict=True))
    assert max(found["points"]["lost_steps"][1]) == lost > 0
    assert any(name.startswith("__system__") for name in found["points"])
    assert found["about"]["attempts"] == 4 and found["hparams"]["max_steps"] == -1
    assert any("attempt 4 goes on from step" in line for line in found["logs"])
    assert any("checkpoint of step 60" in line for line in found["logs"])


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
            log = next((run.folder / "logs").glob("attempt-1/*/attempt_0/0/stderr.log")).read_text()
            assert "training goes on" in log, log
            assert not run.leftovers()
