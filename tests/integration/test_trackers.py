"""The Trainer's trackers over several attempts: one run, each step once. All in one job, as `report_to` allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.wandb_server import wandb_server

SCRIPT = """
import os, sys
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from checkpointing.transformers import resilient

class Dies(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        for step in map(int, os.environ["DIES_AT"].split()):
            died = Path(f"died-{step}")
            if state.global_step == step and not died.exists():
                died.touch()
                os.kill(os.getpid(), 9)

import mlflow
mlflow.set_experiment("mine")
if os.environ["OPENS"]:
    import wandb
    wandb.init(project="mine", config={"own": 1})
    mlflow.start_run(run_name="own")
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=2))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (64, 8))]
arguments = TrainingArguments("out", max_steps=40, save_steps=10, eval_strategy="steps", eval_steps=10, logging_steps=1,
    report_to=["tensorboard", "wandb", "trackio", "mlflow"], use_cpu=True)
trainer = resilient(Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=[Dies()]),
    snapshot_steps=None)
trainer.train()
"""
Points = dict[str, list[tuple[int, float]]]


def tensorboard(folder: Path) -> tuple[int, Points]:
    """The number of runs, and of each curve the steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = list((folder / "out" / "runs").iterdir())
    events = EventAccumulator(str(runs[0]), size_guidance={"scalars": 0}).Reload()
    names = {"loss": "train/loss", "eval_loss": "eval/loss"}
    return len(runs), {key: [(e.step, e.value) for e in events.Scalars(name)] for key, name in names.items()}


def wandb(folder: Path) -> tuple[int, Points]:
    """As `wandb sync` reads them: the files of one run, in the order of their beginnings."""
    from checkpointing.manager.tracker_runs import wandb_rows

    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    rows = [row for file in files for row in wandb_rows(file)]
    # The server takes no row twice, and none that goes back.
    assert [row["_step"] for row in rows] == sorted({row["_step"] for row in rows})
    return len({file.name for file in files}), _by_name(rows)


def trackio(folder: Path) -> tuple[int, Points]:
    # It is not imported twice: where its data lie it asks when it is imported.
    code = """
        import json
        from trackio.sqlite_storage import SQLiteStorage as S
        (project,) = S.get_projects()
        print(json.dumps([S.get_logs(project, run) for run in S.get_runs(project)], default=str))
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    answer = subprocess.run(
        [sys.executable, "-c", code], env=_environment(folder), capture_output=True, text=True, check=True
    )
    runs = json.loads(answer.stdout)
    return len(runs), _by_name([row for run in runs for row in run])


def mlflow(folder: Path) -> tuple[int, Points]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert runs[0].info.status == "FINISHED" and runs[0].data.params["max_steps"] == "40"
    names = ("loss", "eval_loss")
    points = {name: [(m.step, m.value) for m in client.get_metric_history(runs[0].info.run_id, name)] for name in names}
    return len(runs), points


def _by_name(rows: list[dict[str, float]]) -> Points:
    names = {"loss": "train/loss", "eval_loss": "eval/loss"}
    return {
        key: [(int(row["train/global_step"]), float(row[name])) for row in rows if name in row]
        for key, name in names.items()
    }


READERS: list[Callable[[Path], tuple[int, Points]]] = [tensorboard, wandb, trackio, mlflow]


def _environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
    }


# Without a supervisor a run is known by its checkpoints: what died before the first of them is another one.
@pytest.mark.parametrize(
    ("supervised", "dies_at", "opens"),
    [
        pytest.param(True, (7, 25), "", marks=pytest.mark.soak),
        pytest.param(True, (7, 25, 38), "", marks=pytest.mark.soak),
        # The script itself opens the runs of W&B and MLflow.
        pytest.param(True, (7, 25), "yes", marks=pytest.mark.soak),
        pytest.param(False, (25,), "", marks=pytest.mark.soak),
    ],
)
def test_a_run_of_many_attempts_is_one_run_with_each_step_once(
    supervised: bool, dies_at: tuple[int, ...], opens: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = _environment(tmp_path) | {"DIES_AT": " ".join(map(str, dies_at)), "OPENS": opens}
    supervisor = [str(Path(sys.executable).with_name("runner")), "start", "--nproc-per-node=1"]
    command = [*supervisor, "train.py"] if supervised else [sys.executable, "train.py"]
    expected = [0] if supervised else [*(-9 for _ in dies_at), 0]
    for status in expected:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == status, done.stdout + done.stderr
    assert all((tmp_path / f"died-{step}").exists() for step in dies_at)
    for read in READERS:
        num_runs, points = read(tmp_path)
        assert num_runs == 1, read.__name__
        assert Counter(step for step, _ in points["loss"]) == Counter(range(1, 41)), read.__name__
        assert Counter(step for step, _ in points["eval_loss"]) == Counter(range(10, 41, 10)), read.__name__
    if not supervised:
        history = json.loads((tmp_path / "out" / "checkpoint-40" / "trainer_state.json").read_text())["log_history"]
        for read in READERS:
            _, points = read(tmp_path)
            for name, curve in points.items():
                values = {entry["step"]: pytest.approx(entry[name]) for entry in history if name in entry}
                assert dict(curve) == values, (read.__name__, name)


@pytest.mark.soak
@pytest.mark.parametrize("opens", ["", "yes"])
def test_wandbs_client_sends_each_step_once(opens: str, tmp_path: Path) -> None:
    """Online, to a server that answers as W&B's own, as far as the client asks."""
    (tmp_path / "train.py").write_text(SCRIPT.replace('["tensorboard", "wandb", "trackio", "mlflow"]', '"wandb"'))
    command = [str(Path(sys.executable).with_name("runner")), "start", "--nproc-per-node=1", "train.py"]
    with wandb_server() as server:
        environment = _environment(tmp_path) | server.environment | {"DIES_AT": "7 25", "OPENS": opens}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "died-7").exists() and (tmp_path / "died-25").exists()
    [history] = server.rows.values()
    rows = [history[number] for number in sorted(history)]
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    points = _by_name(rows)
    assert Counter(step for step, _ in points["loss"]) == Counter(range(1, 41))
    assert Counter(step for step, _ in points["eval_loss"]) == Counter(range(10, 41, 10))
