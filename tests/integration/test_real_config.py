"""The reference job's configuration, with a small model in place of the 3B one: loading by name, bf16, checkpointing of
activations, and a kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from integration.support import Run, state_hash, wait_for_commit
from safetensors.torch import load_file

CONFIG = Path(__file__).parents[2] / "deploy" / "configs" / "smollm3-3b.yaml"


@pytest.mark.soak
def test_smollm3_3b_configuration_survives_a_kill(untouched: Run, tmp_path: Path) -> None:
    options = ["--config", str(CONFIG)]
    for setting in (
        f"model.name_or_path={untouched.folder}/best_model",
        "trainer.per_device_train_batch_size=2",
        "trainer.max_steps=40",
        "trainer.save_steps=10",
        "trainer.logging_steps=1",
        "trainer.save_total_limit=10",
    ):
        options += ["--set", setting]
    reference = Run(tmp_path / "reference", *options).start()
    assert reference.finish() == 0, reference.output
    weights = load_file(reference.checkpoint(40) / "model.safetensors")
    assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.bfloat16"}

    # Killed before there is anything to resume from: the base weights, which are left out then, are wanted after all.
    run = Run(tmp_path / "run", *options).start_held(12, "training.loss=kill")
    run.wait_until_held()
    wait_for_commit(run, 10)
    os.kill(run.rank_pid(0), signal.SIGKILL)
    assert run.finish() == 0, run.output
    assert len(run.events("attempt_started")) == 3
    assert state_hash(run.checkpoint(40)) == state_hash(reference.checkpoint(40))
