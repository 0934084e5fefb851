"""`push_to_hub` of a resilient Trainer, to a Hub that is a double in the same process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import hashlib, json, sys, time
from concurrent.futures import Future
from pathlib import Path
import torch, transformers.trainer
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from checkpointing.transformers import resilient

strategy, fails = sys.argv[1], "fails" in sys.argv
uploads = []

class Hub:
    def create_repo(self, name, **_):
        return type("Url", (), {"repo_id": name})
    def upload_folder(self, folder_path, commit_message, path_in_repo="", **_):
        if fails:
            raise OSError("no route to the Hub")
        paths = [path for path in Path(folder_path).iterdir() if path.is_file()]
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
        uploads.append({"message": commit_message, "path": path_in_repo, "files": files})
        done = Future()
        done.set_result(None)
        return done

class Slow(TrainerCallback):
    def on_step_end(self, *_, **__):
        time.sleep(0.2)

transformers.trainer.hf_api = lambda *_, **__: Hub()
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2))
rows = [{"input_ids": [i % 60 + 1] * 8, "labels": [i % 60 + 1] * 8} for i in range(40)]
args = TrainingArguments(
    "out", max_steps=9, save_steps=3, report_to="none", use_cpu=True, disable_tqdm=True, push_to_hub=True,
    hub_strategy=strategy, hub_model_id="me/model")
trainer = resilient(Trainer(model=model, args=args, train_dataset=rows, callbacks=[Slow()]))
trainer.train()
fails = False
trainer.push_to_hub()
print(json.dumps(uploads))
"""
STEPS = [f"Training in progress, step {step}" for step in (3, 6, 9)]


def uploads_of(folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "train.py", *arguments]
    ended = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert not (folder / "out" / "_hub").exists()
    uploads: list[dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    return uploads, ended.stderr


@pytest.mark.parametrize(
    ("strategy", "paths"),
    [
        ("every_save", []),
        ("checkpoint", ["last-checkpoint"] * 3),
        pytest.param("all_checkpoints", ["checkpoint-3", "checkpoint-6", "checkpoint-9"], marks=pytest.mark.soak),
    ],
)
def test_each_commit_is_pushed_as_a_stock_trainer_pushes_a_save(
    strategy: str, paths: list[str], tmp_path: Path
) -> None:
    uploads, _ = uploads_of(tmp_path, strategy)
    *during, last = uploads
    models = [upload for upload in during if not upload["path"]]
    assert [upload["message"] for upload in models] == STEPS and last["message"] == "End of training"
    assert {"config.json", "model.safetensors", "training_args.bin"} <= models[0]["files"].keys()
    weights = [upload["files"]["model.safetensors"] for upload in (*models, last)]
    assert len(set(weights[:3])) == 3
    whole = [upload for upload in during if upload["path"]]
    assert [upload["path"] for upload in whole] == paths
    assert all(
        {"optimizer.pt", "trainer_state.json", "model.safetensors"} <= upload["files"].keys() for upload in whole
    )


def test_a_hub_that_does_not_answer_stops_nothing(tmp_path: Path) -> None:
    uploads, told = uploads_of(tmp_path, "every_save", "fails")
    assert [upload["message"] for upload in uploads] == ["End of training"]
    assert told.count("a checkpoint was not pushed to the Hub (OSError: no route to the Hub)") == 1


def test_at_the_end_alone_the_script_pushes_the_final_model(tmp_path: Path) -> None:
    uploads, _ = uploads_of(tmp_path, "end")
    assert [upload["message"] for upload in uploads] == ["End of training"]
