"""The documented examples, as a user would run them: without a supervisor, killed, started again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """What the example trained."""
    state: dict[str, torch.Tensor]
    if (folder / "model.pt").exists():
        state = torch.load(folder / "model.pt", weights_only=True)
    else:
        state = load_file(folder / "final" / "model.safetensors")
    return state


def kill_after_a_checkpoint(command: list[str], folder: Path) -> None:
    steps = (10, 20, 30, 40)
    manifests = [
        place / f"checkpoint-{step}" / "manifest.json" for place in (folder, folder / "checkpoints") for step in steps
    ]
    # It stands still until it is killed.
    held = {**os.environ, "CHECKPOINT_FAILPOINTS": "training.step=hang@45"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=held) as process:
        deadline = time.monotonic() + 400
        while not any(manifest.exists() for manifest in manifests):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "no checkpoint came"
            time.sleep(0.02)
        process.kill()
    assert process.returncode == -9


@pytest.mark.parametrize(
    ("name", "limit"),
    [("hf_trainer.py", 3), ("loop.py", 6), pytest.param("lightning_trainer.py", 3, marks=pytest.mark.soak)],
)
def test_few_lines_make_a_script_survive_sigkill(name: str, limit: int, tmp_path: Path) -> None:
    script = EXAMPLES / name
    assert 0 < len(re.findall(r"# added", script.read_text())) <= limit
    untouched, killed = tmp_path / "untouched", tmp_path / "killed"
    subprocess.run([sys.executable, str(script), str(untouched)], check=True, capture_output=True, timeout=500)
    command = [sys.executable, str(script), str(killed)]
    kill_after_a_checkpoint(command, killed)
    again = subprocess.run(command, check=True, capture_output=True, text=True, timeout=500)
    if name == "loop.py":
        first = re.search(r"step (\d+)", again.stdout)
        assert first is not None and int(first[1]) > 10, "it began from the start"
    expected, found = weights(untouched), weights(killed)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert torch.equal(value, found[key]), key
