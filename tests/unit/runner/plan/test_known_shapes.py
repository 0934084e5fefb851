"""Sizes that are computed equal those of the model that transformers builds."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from runner.config.load import load_config
from runner.config.schema import Config
from runner.plan.known_shapes import known_shape
from runner.training.measure_model import model_shape

# PEFT still uses the older name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "pad_token_id": 0,
}  # fmt: skip


def compare(config: Config) -> None:
    computed = known_shape(config)
    assert computed is not None
    assert {**asdict(computed), "base_bytes": 0} == {**model_shape(config), "base_bytes": 0}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("smollm3", {}),
        ("smollm3", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 32}),
        ("mistral", {"head_dim": 8}),
        ("mistral", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True, "attention_bias": True}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    ],
)
def test_a_family(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **SIZES, **more}))
    compare(Config.model_validate({"model": {"name_or_path": str(tmp_path)}, "method": {"r": 4}}))


def test_the_bundled_job() -> None:
    compare(load_config(None, {}))


def test_a_model_in_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    config = Config.model_validate({"model": {"name_or_path": "org/model"}})
    assert known_shape(config) is None
    folder = tmp_path / "models--org--model"
    for path, text in (
        ("refs/main", "abc\n"),
        ("snapshots/abc/config.json", json.dumps({"model_type": "llama", **SIZES})),
    ):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(text)
    found = known_shape(config)
    assert found is not None and found.layers == 3


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"config": {"hidden_size": 64}}},
        {"model": {"config": SIZES}, "method": {"target_modules": ["q_proj"]}},
        {"model": {"config": SIZES}, "method": {"modules_to_save": ["embed_tokens"]}},
        {"model": {"config": {**SIZES, "model_type": "gemma3"}}},
        {"model": {"name_or_path": "/no/such"}},
    ],
)
def test_what_is_not_known_is_left_to_transformers(sections: dict[str, Any]) -> None:
    assert known_shape(Config.model_validate(sections)) is None
