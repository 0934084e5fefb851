"""Sizes of a model, measured by a process that imports torch."""

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
class ModelShape:
    """Numbers of elements, and sizes of the architecture.

    Attributes:
        parameters: Elements of all parameters.
        tensors: Number of parameter tensors.
        linear: Elements of the linear layers except the output, which QLoRA stores in 4 bits.
        largest_layer: Elements of the largest decoder layer, the unit that FSDP gathers.
        layers: Number of decoder layers.
        hidden: Width of the hidden state.
        intermediate: Width of the MLP.
        heads: Number of attention heads.
        vocab: Size of the vocabulary.
        adapter: Elements that LoRA trains.
        adapter_tensors: Number of tensors that LoRA trains.
        base_bytes: Memory of a process with the imports of a rank, in bytes.
    """

    parameters: int
    tensors: int
    linear: int
    largest_layer: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocab: int
    adapter: int
    adapter_tensors: int
    base_bytes: int


def examine_model(config: Config) -> ModelShape:
    """Build the configured model without its weights, and measure it.

    Args:
        config: The configuration.

    Raises:
        UsageError: The model cannot be found or built.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(config.to_yaml())
        command = [sys.executable, "-m", "runner.training.measure_model", str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"the model could not be built within {_TIMEOUT_S:.0f} s; check that the Hub can be reached"
            ) from None
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
        if "error" in answer:
            raise UsageError(str(answer["error"]))
        return ModelShape(**{field.name: int(answer[field.name]) for field in fields(ModelShape)})
    except (ValueError, IndexError, KeyError, TypeError):
        lines = done.stderr.strip().splitlines()
        raise UsageError(f"the model cannot be built: {lines[-1] if lines else 'no reason given'}") from None
