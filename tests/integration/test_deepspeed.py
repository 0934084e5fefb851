"""The bundled job under DeepSpeed's ZeRO: killed, continued in the same bits, and continued without DeepSpeed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from integration.support import Run, loss_curve, state_hash
from integration.test_sharded import check_shorter_export, two_machines
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpointing.commit.export import export_checkpoint
from checkpointing.format.layout import MASTER_NAME
from checkpointing.storage import LocalStorage
from checkpointing.storage.base import CHECKPOINT_PREFIX

STEPS = 24
JOB = [
    *["--set", "strategy=deepspeed", "--set", f"trainer.max_steps={STEPS}", "--set", "trainer.save_steps=6"],
    *["--set", "trainer.lr_scheduler_type=constant", "--set", "scale_learning_rate=false"],
    *["--set", "trainer.per_device_train_batch_size=2", "--nproc-per-node", "2"],
]


def configuration(folder: Path, stage: int) -> str:
    """Write a file as users of DeepSpeed have it, and return its path."""
    automatic = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    given = dict.fromkeys((*automatic, "gradient_clipping"), "auto")
    file = folder / f"zero-{stage}.json"
    # DeepSpeed knows its own optimizers, which need a compiler, and torch's.
    config = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, "bf16": {"enabled": "auto"}}
    file.write_text(json.dumps(given | config))
    return f"trainer.deepspeed={file}"


def job(folder: Path, *settings: str) -> Run:
    return Run(folder, *JOB, *(option for setting in settings for option in ("--set", setting)))


def kill_after(run: Run) -> Run:
    """Kill a rank of a run that is held at a step, and return the run once it has finished."""
    run.wait_until_held()
    os.kill(run.events("rank_started")[-1]["pid"], signal.SIGKILL)
    assert run.finish() == 0, run.output
    first, second = (event["step"] for event in run.events("training_started"))
    assert first == 0 < second <= 10
    return run


def check_same(calm: Run, killed: Run) -> Path:
    ends = [run.checkpoint(STEPS) for run in (calm, killed)]
    assert state_hash(ends[0]) == state_hash(ends[1]) and loss_curve(ends[0]) == loss_curve(ends[1])
    return ends[1]


def test_the_job_is_killed_and_then_continued_without_deepspeed(tmp_path: Path) -> None:
    zero = configuration(tmp_path, 3)
    calm = job(tmp_path / "calm", zero).start()
    assert calm.finish() == 0, calm.output
    end = check_same(calm, kill_after(job(tmp_path / "killed", zero).start_held(10)))
    whole = AutoModelForCausalLM.from_pretrained(end).state_dict()
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "killed" / "best_model").state_dict()
    assert whole.keys() == best.keys() and all((whole[name] == best[name]).all() for name in whole)
    alone = job(tmp_path / "killed", "strategy=ddp", f"trainer.max_steps={STEPS + 3}")
    alone.command += ["--nproc-per-node", "1"]
    assert alone.start().finish() == 0, alone.output
    assert alone.events("training_started")[-1]["step"] == STEPS


@pytest.mark.soak
@pytest.mark.parametrize(
    ("stage", "settings"),
    [(2, ["trainer.bf16=true"]), (3, ["method.type=lora"]), (1, ["method.type=lora"]), (2, ["method.type=lora"])],
)
def test_other_stages_and_methods(stage: int, settings: list[str], tmp_path: Path) -> None:
    settings = [*settings, configuration(tmp_path, stage)]
    calm = job(tmp_path / "calm", *settings).start()
    assert calm.finish() == 0, calm.output
    end = check_same(calm, kill_after(job(tmp_path / "killed", *settings).start_held(10)))
    if "trainer.bf16=true" in settings:
        precise, model = load_file(end / MASTER_NAME), load_file(end / "model.safetensors")
        assert all(model[name].dtype is torch.bfloat16 for name in model)
        assert all((precise[name].bfloat16() == model[name]).all() for name in precise) and precise
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "killed" / "best_model").num_parameters() > 0


@pytest.mark.soak
def test_no_machine_has_the_whole_state(tmp_path: Path) -> None:
    """Both machines write each checkpoint, and one rank continues from it without DeepSpeed."""
    zero = configuration(tmp_path, 3)
    settings = (zero, f"trainer.max_steps={STEPS}", "trainer.lr_scheduler_type=constant", "scale_learning_rate=false")
    ends = []
    for name, hold in (("calm", None), ("killed", 10)):
        first, second = two_machines(tmp_path / name, hold, "deepspeed", 1, settings)
        if hold is not None:
            first.wait_until_held()
            os.kill(Run(second.folder / "node-1").events("rank_started")[-1]["pid"], signal.SIGKILL)
        assert [first.finish(), second.finish()] == [0, 0], first.output + second.output
        ends.append(tmp_path / name / "checkpoints" / f"{CHECKPOINT_PREFIX}{STEPS}")
    assert not (ends[1] / "model.safetensors").exists()
    exported = []
    for number, end in enumerate(ends):
        exported.append(tmp_path / f"exported-{number}" / end.name)
        export_checkpoint(LocalStorage(end.parent), STEPS, exported[-1])
    assert state_hash(exported[0]) == state_hash(exported[1])
    check_shorter_export(ends[1].parent, STEPS, exported[1])
    alone = job(tmp_path / "alone", "strategy=ddp", f"trainer.max_steps={STEPS + 3}")
    alone.command += ["--nproc-per-node", "1", "--set", f"checkpoint.location={ends[1].parent}"]
    assert alone.start().finish() == 0, alone.output
    assert alone.events("training_started")[0]["step"] == STEPS
