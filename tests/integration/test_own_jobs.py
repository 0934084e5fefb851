"""Users' own jobs, killed five times each under `runner start`: the result is that of the run that nobody touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from integration.support import Run

COMMON = """
import os, signal, sys, time
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers import Trainer, TrainerCallback, TrainingArguments
from checkpointing.host.environment import rank_settings
from checkpointing.transformers import resilient

out = sys.argv[1]
# "2:1.17": in attempt 2, rank 1 dies when step 17 of the first training has ended.
kills = dict(pair.split(":") for pair in os.environ.get("KILLS", "").split(",") if pair)

class Kill(TrainerCallback):
    def __init__(self, stage):
        self.stage = stage
    def on_step_end(self, args, state, control, **_):
        time.sleep(0.05)
        here = kills.get(str(rank_settings().attempt))
        if here == f"{self.stage}.{state.global_step}" and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)

OPTIONS = dict(per_device_train_batch_size=2, save_steps=5, report_to="none", disable_tqdm=True, logging_steps=5,
               use_cpu=True, bf16=False, dataloader_pin_memory=False)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                     num_attention_heads=2, attention_dropout=0.1, pad_token_id=0, eos_token_id=1))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(2, 64, (64, 8))]
"""
TWO_STAGES = """
for stage, (name, steps) in enumerate([("first", 20), ("second", 18)], 1):
    args = TrainingArguments(f"{out}/{name}", max_steps=steps, **OPTIONS)
    data = rows if stage == 1 else rows[:40]
    trainer = resilient(Trainer(model=model, args=args, train_dataset=data, callbacks=[Kill(stage)]))
    trainer.train()
    assert trainer.state.global_step == steps
"""
GRPO = """
from trl import GRPOConfig, GRPOTrainer
words = ["<pad>", "<end>", *(f"w{n}" for n in range(62))]
made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<pad>"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")
seen = []
def reward(prompts, completions, **_):
    seen.append(tuple(prompts))
    return [float(len(text)) for text in completions]
model.save_pretrained(f"{out}/base-{os.environ['RANK']}")
args = GRPOConfig(f"{out}/grpo", max_steps=20, num_generations=4, steps_per_generation=2, max_completion_length=6,
                  **{**OPTIONS, "per_device_train_batch_size": 4})
trainer = resilient(GRPOTrainer(model=model, reward_funcs=reward, args=args, processing_class=tokenizer,
                                train_dataset=Dataset.from_dict({"prompt": [f"w{n} w{n + 1}" for n in range(24)]}),
                                callbacks=[Kill(1)]))
trainer.train()
# Four completions of each prompt, as TRL's sampler wants it.
assert all(len(set(prompts)) * 4 == len(prompts) for prompts in seen)
"""
MIGRATED = """
args = TrainingArguments(f"{out}/stock", max_steps=30, **OPTIONS)
trainer = resilient(Trainer(model=model, args=args, train_dataset=rows, callbacks=[Kill(1)]))
trainer.train(resume_from_checkpoint=os.environ["STOCK"])
"""
END = """
if int(os.environ["RANK"]) == 0:
    torch.save(model.state_dict(), f"{out}/model.pt")
"""
STOCK = """
args = TrainingArguments(out, max_steps=30, **OPTIONS)
class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == int(os.environ["STOP"])
Trainer(model=model, args=args, train_dataset=rows, callbacks=[Stop()]).train()
torch.save(model.state_dict(), f"{out}/model.pt")
"""
JOBS = {
    "two_stages": (TWO_STAGES, "1:1.8,2:1.13,3:2.3,4:2.9,5:2.17"),
    "grpo": (GRPO, "1:1.4,2:1.7,3:1.11,4:1.16,5:1.19"),
    "migrated": (MIGRATED, "1:1.12,2:1.17,3:1.21,4:1.24,5:1.28"),
}


def trained(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = torch.load(folder / "model.pt", weights_only=True)
    return weights


def stock(folder: Path, stop: int) -> dict[str, torch.Tensor]:
    """A stock Trainer's run on two ranks, ended after so many steps; it leaves its checkpoints."""
    folder.mkdir()
    (folder / "stock.py").write_text(COMMON + STOCK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {"STOP": str(stop), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    command = [*torchrun, str(folder / "stock.py"), str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=400, env=environment)
    return trained(folder)


@pytest.mark.parametrize(
    "name", ["two_stages", *(pytest.param(name, marks=pytest.mark.soak) for name in ("grpo", "migrated"))]
)
def test_killed_five_times_it_ends_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    text, kills = JOBS[name]
    results = []
    whole = stock(tmp_path / "whole", 30) if name == "migrated" else None
    for kind, struck in (("untouched", ""), ("killed", kills)):
        if whole is not None and kind == "untouched":
            # Nobody need have run it with us: a stock run of all its steps is the same.
            results.append(whole)
            continue
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "train.py").write_text(COMMON + text + END)
        start = folder / "stock-run" / "checkpoint-10"
        if name == "migrated":
            stock(folder / "stock-run", 10)
        run = Run(folder / "run", "--nproc-per-node", "2", script=[str(folder / "train.py"), str(folder)])
        assert run.start(KILLS=struck, STOCK=str(start)).finish() == 0, run.output
        attempts = run.events("attempt_started")
        assert len(attempts) == len(struck.split(",")) * bool(struck) + 1
        if name == "migrated":
            # A restart does not begin at the stock checkpoint again.
            assert all(event["step"] > 10 for event in run.events("resumed"))
            assert start.is_dir() and not list(start.parent.glob("*.invalid"))
        if name == "two_stages":
            assert (folder / "run" / "checkpoints" / "checkpoint-20").is_dir()
            assert (folder / "run" / "checkpoints" / "stage-2-second" / "checkpoint-18").is_dir()
        results.append(trained(folder))
    first, second = results
    assert first.keys() == second.keys()
    assert [key for key, value in first.items() if not torch.equal(value, second[key])] == []
