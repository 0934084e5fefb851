"""Runs that a program opens itself, of the real trackers, over two attempts of which the first is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from infra.parts import require

from checkpointing.manager.tracker_runs import wandb_rows

# Two runs of each, one after the other; the second attempt has another parameter, and logs from step 2 on.
PROGRAM = """
import os, sys
import mlflow, trackio, wandb
from checkpointing.manager.tracker_runs import CONTINUED, ProgramRuns

attempt, runs = int(sys.argv[1]), ProgramRuns("line")
for name, module in {"wandb": wandb, "mlflow": mlflow, "trackio": trackio}.items():
    CONTINUED[name](runs, module)
mlflow.set_experiment("mine")
if attempt == 0:
    # It is skipped later.
    wandb.init(project="mine", name="prepare").finish()
    mlflow.start_run(run_name="prepare")
    mlflow.end_run()
for number in range(2):
    wandb.init(project="mine", config={"attempt": attempt})
    mlflow.start_run(run_name="mine", tags={"attempt": str(attempt)})
    mlflow.log_param("same", 1)
    mlflow.log_param("attempt", attempt)
    trackio.init("mine")
    for step in range(2 * attempt, 4):
        wandb.log({"loss": step, "number": number})
        mlflow.log_metric("loss", step, step=step)
        trackio.log({"loss": step, "number": number}, step=step)
        if (attempt, number, step) == (0, 1, 1):
            os.kill(os.getpid(), 9)
    wandb.finish()
    mlflow.end_run()
    trackio.finish()
"""
READ_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage as S
print(json.dumps([S.get_logs("mine", run) for run in S.get_runs("mine")], default=str))
"""


def test_each_run_of_a_program_is_one_run_over_all_attempts(tmp_path: Path) -> None:
    # Of the same extra as the others.
    require("wandb")
    settings = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    settings |= {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db", "TRACKIO_DIR": str(tmp_path / "trackio")}
    for attempt, status in ((0, -9), (1, 0)):
        command = [sys.executable, "-c", PROGRAM, str(attempt)]
        done = subprocess.run(command, cwd=tmp_path, env=os.environ | settings, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
    assert "MLflow keeps the parameters of the first attempt" in done.stderr
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    by_run: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        by_run.setdefault(file.name, []).extend(wandb_rows(file))
    assert len(files) == 5 and len(by_run) == 3
    # That of the first attempt alone has no rows.
    by_run = {name: rows for name, rows in by_run.items() if rows}
    assert len(by_run) == 2
    for rows in by_run.values():
        # The server takes no row twice.
        assert [row["_step"] for row in rows] == list(range(len(rows))) and len({row["number"] for row in rows}) == 1
    # A process that is killed loses what wandb has not written.
    fewest, most = sorted(len(rows) for rows in by_run.values())
    assert fewest in (2, 3, 4) and most == 6

    from mlflow import MlflowClient

    client = MlflowClient(settings["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], "attributes.run_name = 'mine'")
    assert [run.data.tags["attempt"] for run in runs] == ["1", "1"]
    assert len(client.search_runs([experiment.experiment_id])) == 3
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert [run.data.params for run in runs] == [{"same": "1", "attempt": "0"}] * 2
    answer = subprocess.run(
        [sys.executable, "-c", READ_TRACKIO], env=os.environ | settings, capture_output=True, text=True, check=True
    )
    logs = json.loads(answer.stdout)
    assert len(logs) == 2 and all(len({row["number"] for row in rows}) == 1 for rows in logs), logs
