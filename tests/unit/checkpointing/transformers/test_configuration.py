"""Configuration files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, SmolLM3Config

from checkpointing.transformers.wrapped_models import configuration_files


class Model(torch.nn.Module):
    pass


class Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        Path(folder, "tokenizer.json").write_text("{}")


def test_a_model_and_its_tokenizer(tmp_path: Path) -> None:
    model: Any = Model()
    model.config, model.generation_config = SmolLM3Config(), GenerationConfig()
    files = configuration_files(model, Tokenizer(), tmp_path, is_adapter=False, is_fsdp=False)
    assert files.keys() == {"config.json", "generation_config.json", "tokenizer.json"}
    assert json.loads(files["config.json"])["architectures"] == ["Model"]
    assert list(tmp_path.iterdir()) == []


def test_the_class_that_fsdp_puts_in_front_is_not_the_architecture(tmp_path: Path) -> None:
    class Front:
        pass

    model: Any = type("FSDPModel", (Front, Model), {})()
    model.config = SmolLM3Config()
    files = configuration_files(model, None, tmp_path, is_adapter=False, is_fsdp=True)
    assert json.loads(files["config.json"])["architectures"] == ["Model"]


def test_a_model_without_configuration_has_no_files(tmp_path: Path) -> None:
    assert configuration_files(Model(), None, tmp_path, is_adapter=False, is_fsdp=True) == {}
