"""What a model is made of. Asked of a process that has torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path

from runner.config.schema import Config
from runner.errors import UsageError

_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Anatomy:
    """Numbers of elements, and the architecture's sizes.

    Attributes:
        linear: elements of the linear layers but the output; QLoRA holds them in 4 bits.
        largest_layer: elements of the largest decoder layer; FSDP gathers one at a time.
        adapter: elements that LoRA trains.
        base_bytes: of a process that has imported what a rank imports, on this machine.
    """

    parameters: int
    tensors: int
    linear: int
    largest_layer: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    adapter: int
    adapter_tensors: int
    base_bytes: int


def examine_model(config: Config) -> Anatomy:
    """Build the configured model without its weights, and measure it.

    Raises:
        UsageError: the model cannot be found or built.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(config.to_yaml())
        command = [sys.executable, "-m", "runner.training.model_shape", str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            raise UsageError(f"the model could not be examined within {_TIMEOUT_S:.0f} s; is the hub away?") from None
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
        if "error" in answer:
            raise UsageError(str(answer["error"]))
        return Anatomy(**{field.name: int(answer[field.name]) for field in fields(Anatomy)})
    except (ValueError, IndexError, KeyError, TypeError):
        lines = done.stderr.strip().splitlines()
        raise UsageError(f"the model cannot be built: {lines[-1] if lines else 'no reason given'}") from None
