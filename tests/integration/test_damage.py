"""Damaged checkpoints are passed over, named and kept; stock Hugging Face reads the good ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from integration.support import SHORT_JOB, TOTAL_STEPS, Run, loss_curve, state_hash


def copy_unfinished(run: Run, folder: Path) -> Run:
    """The same checkpoints, without the record that the run had ended."""
    shutil.copytree(run.folder / "checkpoints", folder / "checkpoints")
    shutil.copytree(run.folder / "cache", folder / "cache")
    return Run(folder, *SHORT_JOB)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.soak
def test_three_damaged_checkpoints_in_a_row(untouched: Run, tmp_path: Path) -> None:
    run = copy_unfinished(untouched, tmp_path / "run")
    truncate(run.checkpoint(70) / "model.safetensors")
    flip_bit(run.checkpoint(60) / "optimizer.pt")
    (run.checkpoint(40) / "manifest.json").unlink()
    assert run.start().finish() == 0, run.output

    assert run.events("training_started")[0]["step"] == 20
    aside = {event["step"]: event for event in run.events("checkpoint_quarantined")}
    assert set(aside) == {70, 60, 40}
    assert "bytes" in aside[70]["reason"] and "digest" in aside[60]["reason"] and "manifest" in aside[40]["reason"]
    for step, event in aside.items():
        assert Path(event["kept_as"]).is_dir()
        assert f"checkpoint-{step} is not used" in run.output
    assert state_hash(run.checkpoint(TOTAL_STEPS)) == state_hash(untouched.checkpoint(TOTAL_STEPS))
    assert loss_curve(run.checkpoint(TOTAL_STEPS)) == loss_curve(untouched.checkpoint(TOTAL_STEPS))


def test_no_valid_checkpoint_is_never_a_silent_restart(untouched: Run, tmp_path: Path) -> None:
    run = copy_unfinished(untouched, tmp_path / "run")
    for step in (20, 40, 60, 70):
        flip_bit(run.checkpoint(step) / "model.safetensors")
    assert run.start().finish() == 81, run.output
    assert "none is valid" in run.output and "Traceback" not in run.output
    assert not run.events("training_started")
    # A second start ends alike: the quarantined checkpoints still count.
    assert run.start().finish() == 81, run.output


def test_resume_from_a_chosen_step(untouched: Run, tmp_path: Path) -> None:
    run = copy_unfinished(untouched, tmp_path / "run")
    run.command[run.command.index("auto")] = "40"
    assert run.start().finish() == 0, run.output
    assert run.events("training_started")[0]["step"] == 40
    assert (run.folder / "checkpoints" / "checkpoint-60.superseded").is_dir()
    assert state_hash(run.checkpoint(TOTAL_STEPS)) == state_hash(untouched.checkpoint(TOTAL_STEPS))

    run.command[run.command.index("40")] = "33"
    assert run.start().finish() == 2
    assert "--resume 33" in run.output and "20, 40" in run.output


def test_stock_hugging_face_reads_our_checkpoint(untouched: Run, tmp_path: Path) -> None:
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
    from trl import SFTConfig, SFTTrainer

    from runner.training.training_data import BUNDLED

    checkpoint = untouched.checkpoint(60)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    best = AutoModelForCausalLM.from_pretrained(untouched.folder / "best_model")
    assert AutoTokenizer.from_pretrained(untouched.folder / "best_model").eos_token_id == tokenizer.eos_token_id
    assert best.num_parameters() == model.num_parameters()

    options: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 62,
        "per_device_train_batch_size": 4,
        "report_to": "none",
        "max_length": 96,
        "disable_tqdm": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "activation_checkpointing": False,
    }
    data = load_dataset("parquet", data_files=str(BUNDLED), split="train", cache_dir=str(tmp_path / "cache"))
    sft = SFTTrainer(model=model, args=SFTConfig(**options), train_dataset=data, processing_class=tokenizer)
    trainer = Trainer(model=model, args=sft.args, train_dataset=sft.train_dataset, data_collator=sft.data_collator)
    result = trainer.train(resume_from_checkpoint=str(checkpoint))
    assert result.global_step == 62
    assert trainer.optimizer is not None
    # The optimizer's state was restored: its step counter continues from 60.
    assert {float(state["step"]) for state in trainer.optimizer.state.values()} == {62.0}
