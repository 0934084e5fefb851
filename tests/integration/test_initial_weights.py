"""A new run begins with the weights of another one, and resumes as any other run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from integration.support import RUNNER
from safetensors.torch import load_file

from checkpointing.agent.events import BegunWithWeights
from runner.journal.journal import read_journal

LOOP = """
import os, torch
from checkpointing import CheckpointManager
torch.distributed.init_process_group("gloo")
torch.manual_seed(1)
inner = torch.nn.Linear(4, 1)
model = torch.nn.parallel.DistributedDataParallel(inner)
optimizer = torch.optim.SGD(model.parameters(), lr=float(os.environ["LR"]))
manager = CheckpointManager("checkpoints", model=inner, optimizer=optimizer, save_steps=4)
for step in range(manager.resume(), 8):
    model(torch.ones(2, 4)).sum().backward()
    if step == 6 and os.environ.get("KILL") == os.environ["RANK"] and not os.path.exists("fired"):
        open("fired", "w").close()
        os.kill(os.getpid(), 9)
    optimizer.step()
    optimizer.zero_grad()
    manager.step(step + 1)
manager.close()
"""
TRAINER = """
import os, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
torch.manual_seed(1)
model = LlamaForCausalLM(LlamaConfig(vocab_size=int(os.environ.get("VOCAB", "16")), hidden_size=8, intermediate_size=16,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))
rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 64
arguments = TrainingArguments("out", max_steps=8, save_steps=4, use_cpu=True, report_to="none", disable_tqdm=True,
    learning_rate=float(os.environ["LR"]), lr_scheduler_type="constant", weight_decay=0.0)
Trainer(model=model, args=arguments, train_dataset=rows).train()
"""


def start(folder: Path, name: str, ranks: int, *options: str, **environment: str) -> tuple[int, str]:
    command = [*RUNNER, "start", "--output-dir", name, "--nproc-per-node", str(ranks), *options, "train.py"]
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def weights(folder: Path, name: str, step: int = 8) -> dict[str, Any]:
    return {
        key: value.tolist()
        for key, value in load_file(folder / name / "checkpoints" / f"checkpoint-{step}" / "model.safetensors").items()
    }


@pytest.mark.parametrize(("program", "ranks"), [(LOOP, 1), (LOOP, 3), (TRAINER, 2)], ids=["1", "3", "trainer-2"])
def test_a_run_begins_with_the_weights_of_another_and_with_nothing_else(
    program: str, ranks: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(program)
    code, output = start(tmp_path, "first", ranks, LR="0.1")
    assert code == 0, output
    first = str(tmp_path / "first" / "checkpoints" / "checkpoint-8")
    # Steps that change nothing show what they began with.
    code, output = start(tmp_path, "same", ranks, "--init-from", first, LR="0.0")
    assert code == 0 and f"tensors from {first}" in output, output
    assert weights(tmp_path, "same") == weights(tmp_path, "first")
    journal = read_journal(tmp_path / "same" / "journal.jsonl")
    (begun,) = [entry.event for entry in journal if isinstance(entry.event, BegunWithWeights)]
    assert begun.folder == first and begun.loaded > 0 == begun.missing
    # It is a run from step 0, which is resumed from its own checkpoints.
    code, output = start(tmp_path, "calm", ranks, "--init-from", first, LR="0.1")
    assert code == 0 and "step" in output
    assert weights(tmp_path, "calm") != weights(tmp_path, "first")
    code, output = start(tmp_path, "killed", ranks, "--init-from", first, LR="0.1", KILL=str(ranks - 1))
    assert code == 0, output
    assert program is TRAINER or "was killed by SIGKILL; restarting" in output, output
    assert weights(tmp_path, "killed") == weights(tmp_path, "calm")
    if program is TRAINER:
        code, output = start(tmp_path, "wider", ranks, "--init-from", first, LR="0.0", VOCAB="20")
        assert code == 0 and "16 of 20 rows" in output, output
        wider, before = weights(tmp_path, "wider"), weights(tmp_path, "first")
        assert wider["model.embed_tokens.weight"][:16] == before["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--init-from", "/nonexistent"], "no such folder"),
        (["--init-from", "."], "it holds none of"),
        (["--init-from", ".", "--resume-from", "."], "exclude each other"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(options: list[str], part: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    code, output = start(tmp_path, "run", 1, *options, LR="0.1")
    assert code == 2 and part in output and not (tmp_path / "run").exists(), output


def test_weights_of_another_model_end_the_run_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    assert start(tmp_path, "first", 1, LR="0.1")[0] == 0
    (tmp_path / "train.py").write_text(LOOP.replace("Linear(4, 1)", "Linear(5, 1)").replace("ones(2, 4)", "ones(2, 5)"))
    first = "first/checkpoints/checkpoint-8"
    code, output = start(tmp_path, "second", 2, "--init-from", first, LR="0.1")
    assert code == 78 and "weight has the shape (1, 4) and (1, 5) in the model" in output, output
