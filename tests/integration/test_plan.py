"""What `runner plan` says, against what a rank has taken; the job made small; the simulation by its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.command_line import run_command
from integration.support import Run

# 26 million parameters: what the model needs is more than what an interpreter needs.
WIDE = (
    "model.config={hidden_size: 512, intermediate_size: 1536, num_hidden_layers: 8, num_attention_heads: 8, "
    "num_key_value_heads: 2, max_position_embeddings: 512}"
)
LONG = ("trainer.packing=true", "trainer.max_length=256")
JOBS = {
    "bundled": [],
    "full": [WIDE, "model.vocab_size=4096"],
    "lora": [WIDE, "method.type=lora"],
    "recomputed": [WIDE, *LONG, "trainer.per_device_train_batch_size=8", "trainer.activation_checkpointing=true"],
}


# The larger ones, half a minute and more each.
LONG_JOBS = ("full", "lora", "recomputed")


@pytest.mark.parametrize(
    "job", [pytest.param(job, marks=[pytest.mark.soak] if job in LONG_JOBS else []) for job in JOBS]
)
def test_memory_is_within_15_percent(job: str, tmp_path: Path) -> None:
    options = [part for setting in JOBS[job] for part in ("--set", setting)]
    done = run_command("plan", "--output-dir", str(tmp_path / "run"), *options, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    name = "LoRA, DDP" if job == "lora" else "full, DDP"
    assert plan["chosen"] == name and plan["why"] == "as configured, and it fits"
    planned = next(option["peak_bytes"] for option in plan["options"] if option["name"] == name)

    few = ("--set", "trainer.max_steps=4", "--set", "trainer.logging_steps=1", "--set", "trainer.save_steps=2")
    run = Run(tmp_path / "run", *options, *few).start()
    assert run.finish(500) == 0, run.output
    measured = 1e9 * max(event["peak_memory_gb"] for event in run.events("log"))
    print(f"{job}: planned {planned / 1e9:.3f} GB, measured {measured / 1e9:.3f} GB, {planned / measured:.3f}")
    assert planned == pytest.approx(measured, rel=0.15)
    # The checkpoint, to the byte but for what is not tensors.
    committed = run.events("committed")[-1]["nbytes"]
    assert plan["saving"] and next(
        option["bytes"]["checkpoint_bytes"] for option in plan["options"] if option["name"] == name
    ) == pytest.approx(committed, rel=0.03, abs=300_000)


@pytest.mark.soak
def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    large = "model.config={hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, num_attention_heads: 32}"
    options = ["--set", large, "--set", "trainer.bf16=true", "--gpus", "8", "--output-dir", str(tmp_path / "run")]
    told = {}
    for memory in ("80GB", "400GB"):
        done = run_command("plan", *options, "--gpu-memory", memory, "--json", "--mttf-hours", "24")
        assert done.returncode == 0, done.stderr
        told[memory] = json.loads(done.stdout)
    assert [told[memory]["chosen"] for memory in told] == ["full, FSDP", "full, DDP"]
    assert "full, DDP does not fit" in told["80GB"]["why"]
    page = run_command("plan", *options, "--gpu-memory", "1GB")
    assert page.returncode == 0 and "nothing fits" in page.stdout, page.stderr
    for wrong, word in (
        (["--gpu-memory", "much"], "'much'"),
        (["--copy-rate", "0"], "above 0"),
        (["--work-hours", "inf"], "not a finite number"),
        (["--set", "model.name_or_path=/no/such/model"], "/no/such/model"),
        (["--gpus", "8"], "--gpu-memory"),
    ):
        done = run_command("plan", "--output-dir", str(tmp_path / "run"), *wrong)
        assert done.returncode == 2 and word in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_simulated_by_its_run_command(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    vary = ("--vary", "commit_interval_s=60,3600", "--target", "0.95", "--runs", "20", "--plot", str(page))
    done = run_command("simulate", "--work-hours", "200", "--mttf-hours", "3.1", *vary)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].rstrip().endswith("yes") and lines[2].rstrip().endswith("no"), done.stdout
    assert "commit_interval_s" in page.read_text()
    told = run_command("simulate", "--gpus", "1024", "--list")
    assert f"mttf_s={7.9 * 3600:g}" in told.stdout.splitlines(), told.stderr
    failed = run_command("simulate", "--gpus", "8", "--mttf-hours", "3")
    assert failed.returncode == 2 and "pass only one" in failed.stderr
    failed = run_command("simulate", "--vary", "nothing=1")
    assert failed.returncode == 2 and "unknown; see runner simulate --list" in failed.stderr
    failed = run_command("simulate", "--from", str(tmp_path))
    assert failed.returncode == 2 and "holds no run" in failed.stderr


@pytest.mark.soak
def test_the_job_made_small(tmp_path: Path) -> None:
    """Nothing of the run itself is touched, whatever its checkpoints' place is."""
    place = tmp_path / "place"
    options = ("--set", f"checkpoint.location={place}", "--set", "trainer.num_train_epochs=100", "--debug")
    for _ in range(2):
        run = Run(tmp_path / "run", *options).start()
        assert run.finish() == 0, run.output
    small = Run(tmp_path / "run-debug")
    assert not (tmp_path / "run").exists() and not place.exists()
    assert [event["step"] for event in small.events("log")] == list(range(1, 21))
    assert {event["step"] for event in small.events("committed")} == {5, 10, 15, 20}
    failed = run_command("start", "--debug", "train.py")
    assert failed.returncode == 2, failed.stderr
    # Every save blocks, what ranks say is shown, and torch says more.
    assert all(not event["overlapped"] for event in small.events("snapshot_cost"))
    assert "[rank1]" in run.output and "torch" in run.output
