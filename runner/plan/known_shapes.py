"""Sizes of decoders of known families, computed from their configuration: nothing is loaded and built for them.

All have attention with grouped queries, a gated MLP, and two RMSNorms in each layer; families differ in biases, and in
norms of queries and keys. The unit test compares each with the model that transformers builds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.config.schema import Config
from runner.plan.memory_need import ModelShape

# What a process of a rank holds once it has imported the bundled job (2026-11-29: torch 2.13 for CPUs, transformers
# 5.23, trl 1.16, Python 3.11, x86-64; `measure_model` measures it where a model is built).
LIBRARIES_BYTES = 555_000_000
_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
# By `model_type`, what the configuration class sets where a file says nothing.
_FAMILIES: dict[str, dict[str, Any]] = {
    "smollm3": {"tie_word_embeddings": True, "head_dim": None},
    "llama": {},
    "mistral": {"attention_bias": False, "mlp_bias": False},
    "qwen2": {"qkv_bias": True, "attention_bias": False, "mlp_bias": False, "head_dim": None},
    "qwen3": {"head_norms": True, "head_dim": 128, "mlp_bias": False},
}
# These are what they are, whatever a file says.
_FIXED = {"mistral": ("attention_bias", "mlp_bias"), "qwen2": ("attention_bias", "mlp_bias"), "qwen3": ("mlp_bias",)}


def known_shape(config: Config) -> ModelShape | None:
    """Return the sizes of the configured model; None if its family or configuration is not known here."""
    method = config.method
    found = _configuration(config)
    if found is None or method.target_modules != "all-linear" or method.modules_to_save:
        return None
    family = _FAMILIES.get(str(found.get("model_type")))
    if family is None or any(not isinstance(found.get(name), int) for name in (*_REQUIRED, "vocab_size")):
        return None
    if found.get("quantization_config") or found.get("pruned_heads"):
        return None
    fixed = {name: family[name] for name in _FIXED.get(str(found["model_type"]), ())}
    return _shape({**family, **found, **fixed}, method.r)


def _shape(one: Mapping[str, Any], rank: int) -> ModelShape:
    hidden, inner, layers, vocab = (
        one["hidden_size"], one["intermediate_size"], one["num_hidden_layers"], one["vocab_size"],
    )  # fmt: skip
    heads, groups = one["num_attention_heads"], one["num_key_value_heads"]
    width = one.get("head_dim") or hidden // heads
    attends, mlp = bool(one.get("attention_bias")), bool(one.get("mlp_bias"))
    with_queries = attends or bool(one.get("qkv_bias"))
    # Inputs, outputs and bias of each linear layer.
    linear = [
        (hidden, heads * width, with_queries),
        (hidden, groups * width, with_queries),
        (hidden, groups * width, with_queries),
        (heads * width, hidden, attends),
        (hidden, inner, mlp),
        (hidden, inner, mlp),
        (inner, hidden, mlp),
    ]
    weights = sum(inputs * outputs for inputs, outputs, _ in linear)
    biases = [outputs for _, outputs, has_bias in linear if has_bias]
    norms = [hidden, hidden, *([width, width] if one.get("head_norms") else [])]
    layer = weights + sum(biases) + sum(norms)
    embeddings = 1 if one.get("tie_word_embeddings") else 2
    return ModelShape(
        parameters=layers * layer + hidden + embeddings * vocab * hidden,
        tensors=layers * (len(linear) + len(biases) + len(norms)) + 1 + embeddings,
        linear=layers * weights,
        largest_layer=layer,
        layers=layers,
        hidden=hidden,
        intermediate=inner,
        heads=heads,
        vocab=vocab,
        adapter=layers * rank * sum(inputs + outputs for inputs, outputs, _ in linear),
        adapter_tensors=2 * layers * len(linear),
        base_bytes=LIBRARIES_BYTES,
    )


def _configuration(config: Config) -> dict[str, Any] | None:
    """Return the configuration of the model: of a new one, or what a folder or the Hub's cache has."""
    name, own = config.model.name_or_path, config.model.config
    if name is None:
        return {"model_type": "smollm3", "vocab_size": config.model.vocab_size, **own}
    for folder in (Path(name), *_cached(name)):
        try:
            found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return {**found, **own} if isinstance(found, dict) else None
    return None


def _cached(name: str) -> list[Path]:
    """Return the folder of a model's newest revision in the Hub's cache, as huggingface_hub keeps it."""
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    folder = hub / f"models--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return []
    return [folder / "snapshots" / revision]
