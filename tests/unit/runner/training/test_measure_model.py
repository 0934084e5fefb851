"""Sizes of a model that is built without its weights."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from runner.config.schema import Config
from runner.errors import UsageError
from runner.plan.memory_need import ModelShape
from runner.training.measure_model import main, model_shape

# PEFT still uses the older name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 16, 32, 2, 300
SMALL = {
    "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def config(**sections: Any) -> Config:
    return Config.model_validate({"model": {"config": SMALL, "vocab_size": VOCAB}, **sections})


def test_parameters_are_counted_as_by_hand() -> None:
    shape = model_shape(config())
    # Attention: query and output are square, key and value have half as many heads. MLP: three matrices. Two norms.
    attention, mlp = 3 * HIDDEN * HIDDEN, 3 * HIDDEN * INTERMEDIATE
    assert shape["largest_layer"] == attention + mlp + 2 * HIDDEN
    assert shape["linear"] == LAYERS * (attention + mlp)
    # The output shares the embedding's weights.
    assert shape["parameters"] == LAYERS * shape["largest_layer"] + HIDDEN + VOCAB * HIDDEN
    assert (shape["layers"], shape["hidden"], shape["intermediate"]) == (LAYERS, HIDDEN, INTERMEDIATE)
    assert (shape["heads"], shape["vocab"]) == (4, VOCAB)
    assert {field.name for field in fields(ModelShape)} == set(shape) and shape["base_bytes"] > 50_000_000


def test_adapters_are_counted_for_every_method() -> None:
    """A plan compares LoRA with the configured method."""
    small = model_shape(config(method={"r": 2, "target_modules": ["q_proj"]}))
    large = model_shape(config(method={"type": "lora", "r": 4, "target_modules": ["q_proj"]}))
    assert small["adapter"] == LAYERS * 2 * (HIDDEN + HIDDEN) and small["adapter_tensors"] == 2 * LAYERS
    assert large["adapter"] == 2 * small["adapter"]


def test_layers_that_adapters_cannot_find_are_named() -> None:
    with pytest.raises(UsageError, match=r"method\.target_modules=\['nowhere'\]"):
        model_shape(config(method={"target_modules": ["nowhere"]}))


def test_a_model_without_a_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(UsageError, match=r"cannot load its configuration") as error:
        model_shape(config(model={"name_or_path": str(tmp_path / "model")}))
    assert "\n" not in str(error.value)


def test_the_command_prints_json_or_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    monkeypatch.setattr(sys, "argv", ["model_shape", str(file)])
    for target, code, key in (("q_proj", 0, "parameters"), ("nowhere", 2, "error")):
        file.write_text(config(method={"target_modules": [target]}).to_yaml())
        assert main() == code
        assert key in json.loads(capsys.readouterr().out.splitlines()[-1])
