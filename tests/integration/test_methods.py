"""Training methods: each one is killed twice, resumes from memory and from disk, and ends with the same result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from integration.support import Run, history, state_hash
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

SHORT = ["trainer.max_steps=24", "trainer.save_steps=6", "trainer.logging_steps=4", "trainer.save_total_limit=9"]
LORA = ["method.type=lora", "method.r=4"]
METHODS = {
    "lora": LORA,
    # Several options of `SFTConfig` at once. Without bf16, which takes six minutes on a CPU: the last one has it.
    "lora-packed": [
        *LORA,
        "trainer.packing=true",
        "trainer.max_length=128",
        "trainer.packing_strategy=wrapped",
        "trainer.activation_checkpointing=true",
        "trainer.gradient_accumulation_steps=2",
        "trainer.max_grad_norm=0.1",
    ],
    "sharded": ["strategy=fsdp", "trainer.gradient_accumulation_steps=2"],
    "full-bf16-accumulated": ["trainer.bf16=true", "trainer.gradient_accumulation_steps=2", "trainer.max_grad_norm=0"],
}


def job(folder: Path, *settings: str) -> Run:
    return Run(folder, *(part for setting in (*SHORT, *settings) for part in ("--set", setting)))


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.soak] * (name != "lora-packed")) for name in METHODS]
)
def test_each_method_ends_as_if_nothing_had_happened(method: str, tmp_path: Path) -> None:
    calm = job(tmp_path / "calm", *METHODS[method]).start()
    assert calm.finish() == 0, calm.output
    # A rank is killed after step 9; later the agent, in mid-commit, with the snapshots that it holds.
    run, fired = job(tmp_path / "run", *METHODS[method]), tmp_path / "fired"
    fired.mkdir()
    run.start(CHECKPOINT_FAILPOINTS="training.step=kill@9; local.begun=kill@3", CHECKPOINT_FAILPOINTS_ONCE=str(fired))
    assert run.finish() == 0, run.output
    assert [event["kind"] for event in run.events("attempt_ended")] == ["crashed", "checkpoint agent lost", "finished"]
    assert {event["source"] for event in run.events("resumed")} == {"memory", "local"}
    assert not run.events("snapshot_dropped")
    # On a slow disk saves are skipped, except the last one.
    steps = [step for step in (6, 12, 18, 24) if run.checkpoint(step).exists() and calm.checkpoint(step).exists()]
    assert steps[-1] == 24
    for step in steps:
        assert state_hash(run.checkpoint(step)) == state_hash(calm.checkpoint(step)), step
    assert history(run.checkpoint(24)) == history(calm.checkpoint(24))
    # The history covers all attempts, as if there had been only one.
    told = [json.loads((one.folder / "training_history.json").read_text()) for one in (run, calm)]
    assert losses(told[0]) == losses(told[1]) and len(losses(told[0])) == 6


@pytest.mark.soak
def test_an_adapter_is_saved_without_its_base_and_refuses_another(tmp_path: Path) -> None:
    run = job(tmp_path / "run", *LORA).start()
    assert run.finish() == 0, run.output
    checkpoint = run.checkpoint(24)
    assert not (checkpoint / "model.safetensors").exists() and not (checkpoint / "config.json").exists()
    with safe_open(checkpoint / "adapter_model.safetensors", "pt") as file:
        assert all("lora_" in name for name in file.keys())  # noqa: SIM118 - it has no other way
    assert json.loads((checkpoint / "adapter_config.json").read_text())["r"] == 4
    # The base was made for this run: best_model stands alone.
    AutoModelForCausalLM.from_pretrained(run.folder / "best_model")

    other_base = job(run.folder, *LORA, "trainer.max_steps=30", "trainer.seed=7")
    assert other_base.start().finish() == 2 and "(trainer.seed: 42 -> 7)" in other_base.output, other_base.output
    other_base.command.append("--allow-changes")
    assert other_base.start().finish() == 78, other_base.output
    assert "was trained on another base model" in other_base.output and "Traceback" not in other_base.output
    assert run.checkpoint(24).exists(), "a refused checkpoint was quarantined"


def losses(entries: list[dict[str, float]]) -> list[tuple[float, float, float]]:
    return [(entry["step"], entry["loss"], entry["perplexity"]) for entry in entries if "loss" in entry]


def test_the_best_checkpoint_is_published(tmp_path: Path) -> None:
    """Not the last, where that is worse: what is held back is nothing like the rest."""
    path = tmp_path / "held.jsonl"
    rows = "".join(json.dumps({"prompt": "?", "completion": "~^`|{}<>" * 9 + str(n)}) + "\n" for n in range(8))
    path.write_text(rows)
    wild = ["trainer.learning_rate=0.002", "trainer.lr_scheduler_type=constant", "trainer.save_total_limit=1"]
    run = job(tmp_path / "run", f"data.validation_path={path}", *wild, "trainer.warmup_steps=0").start()
    assert run.finish() == 0, run.output
    measured = {event["step"]: event["eval_loss"] for event in run.events("evaluated")}
    assert sorted(measured) == [6, 12, 18, 24]
    best = min(measured, key=lambda step: measured[step])
    assert best < 24, measured
    assert run.events("best_model")[0]["step"] == best
    # It outlives `save_total_limit`, and is what is published.
    assert sorted(folder.name for folder in (run.folder / "checkpoints").glob("checkpoint-*")) == sorted(
        ["checkpoint-24", f"checkpoint-{best}"]
    )
    kept, published = (load_file(f / "model.safetensors") for f in (run.checkpoint(best), run.folder / "best_model"))
    assert kept.keys() == published.keys() and all(torch.equal(kept[name], published[name]) for name in kept)
    entries = json.loads((run.folder / "training_history.json").read_text())
    assert {e["step"]: e["eval_perplexity"] for e in entries if "eval_loss" in e}.keys() == measured.keys()
