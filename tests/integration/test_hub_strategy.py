"""`push_to_hub` of a script under the runner, to a Hub on loopback: what a crash has cut off is pushed after it."""

from __future__ import annotations

from pathlib import Path

from helpers.hub_server import WRITER, hub_server
from integration.support import Run

SCRIPT = """
import time
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2))
rows = [{"input_ids": [i % 60 + 1] * 8, "labels": [i % 60 + 1] * 8} for i in range(40)]

class Slow(TrainerCallback):
    def on_step_end(self, *_, **__):
        time.sleep(0.3)

args = TrainingArguments(
    "out", max_steps=9, save_steps=3, report_to="none", use_cpu=True, disable_tqdm=True, push_to_hub=True,
    hub_strategy="all_checkpoints", hub_model_id="me/model")
Trainer(model=model, args=args, train_dataset=rows, callbacks=[Slow()]).train()
"""


def test_a_push_that_a_crash_has_cut_off_is_made_after_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with hub_server() as hub:
        run = Run(tmp_path / "run", "--nproc-per-node", "1", script=[str(tmp_path / "train.py")])
        # The server does not speak Xet. The rank is killed after step 7, while it pushes the checkpoint of step 6.
        environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": WRITER, "HF_HUB_DISABLE_XET": "1"}
        environment |= {"CHECKPOINT_FAILPOINTS": "training.step=kill@7", "CHECKPOINT_FAILPOINTS_ONCE": str(run.fired)}
        assert run.start(**environment).finish() == 0, run.output
        repository = hub.repositories["me/model"]
        assert len(run.events("attempt_started")) == 2
        for step in (6, 9):
            assert f"checkpoint-{step}/model.safetensors" in repository.files, repository.files.keys()
        titles = [commit["title"] for commit in repository.commits]
        assert titles[0] == "Training in progress, step 9, checkpoint"
