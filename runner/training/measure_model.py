"""`python -m runner.training.measure_model CONFIG` prints the sizes of the configured model as JSON.

It is its own process, because the commands that need the sizes run without torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

from runner.config.load import load_config
from runner.config.schema import Config
from runner.errors import UsageError
from runner.training import job  # noqa: F401 - Imported to measure the memory of a rank's imports.
from runner.training.model import adapter_config


def model_shape(config: Config) -> dict[str, Any]:
    """Build the configured model on the meta device; return the fields of `runner.plan.memory_need.ModelShape`.

    Raises:
        UsageError: The model cannot be found, or has no such layers.
    """
    # Not ru_maxrss, which a new process inherits from the one that has forked it (getrusage(2)).
    base_bytes = _peak_rss_bytes()
    model_config = _model_config(config)
    with torch.device("meta"):
        model = (
            SmolLM3ForCausalLM(model_config)
            if config.model.name_or_path is None
            else AutoModelForCausalLM.from_config(model_config)
        )
    layers = next((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), torch.nn.ModuleList())
    output = model.get_output_embeddings()
    linear = [one for one in model.modules() if isinstance(one, torch.nn.Linear) and one is not output]
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tensors": sum(1 for _ in model.parameters()),
        "linear": sum(one.weight.numel() for one in linear),
        "largest_layer": max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0),
        "layers": model_config.num_hidden_layers,
        "hidden": model_config.hidden_size,
        "intermediate": getattr(model_config, "intermediate_size", None) or 4 * model_config.hidden_size,
        "heads": model_config.num_attention_heads,
        "vocab": model_config.vocab_size,
    }
    lora = adapter_config(config.method.model_copy(update={"type": "lora"}))
    try:
        from peft import get_peft_model

        adapted = get_peft_model(model, lora)
    except ValueError as error:
        raise UsageError(f"method.target_modules={config.method.target_modules!r}: {error}") from None
    adapters = [p for p in adapted.parameters() if p.requires_grad]
    sizes = {"adapter": sum(p.numel() for p in adapters), "adapter_tensors": len(adapters)}
    return {**facts, **sizes, "base_bytes": base_bytes}


def _model_config(config: Config) -> Any:
    options, name = config.model.config, config.model.name_or_path
    if name is None:
        return SmolLM3Config(vocab_size=config.model.vocab_size, pad_token_id=0, **options)
    try:
        return AutoConfig.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        text = " ".join(str(error).split())
        raise UsageError(f"model.name_or_path={name!r}: cannot load its configuration: {text[:300]}") from None


def _peak_rss_bytes() -> int:
    """Return the most memory that this program has had resident: VmHWM of proc_pid_status(5)."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])


def main() -> int:
    """Print the sizes, or an error as JSON; return the exit code."""
    try:
        config = load_config(sys.argv[1], {}, needs_data=False)
        print(json.dumps(model_shape(config)))
    except UsageError as error:
        print(json.dumps({"error": str(error)}))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
