"""What is saved of PEFT models, trainers whose model is in a DeepSpeed engine, and configuration files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
from transformers import GenerationConfig, SmolLM3Config, SmolLM3ForCausalLM

from checkpointing.transformers import wrapped_models
from checkpointing.transformers.wrapped_models import (
    adapter_of,
    configuration_files,
    set_batch_shape,
    tracked_model,
)


def with_adapter(*layers: torch.nn.Module) -> Any:
    return peft.get_peft_model(torch.nn.Sequential(*layers), peft.LoraConfig(r=2, target_modules=["0"]))


def test_of_a_plain_base_the_adapter_is_saved() -> None:
    """A base that is no model of transformers has no configuration with a name."""
    adapter = adapter_of(with_adapter(torch.nn.Linear(4, 4)))
    assert adapter is not None


def test_a_model_without_an_adapter_has_none() -> None:
    assert adapter_of(torch.nn.Linear(2, 2)) is None


def injected() -> Any:
    """A model of transformers to which an adapter was added without a PEFT model around it."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = SmolLM3Config(
        **sizes, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    model: Any = SmolLM3ForCausalLM(config)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    return model


class Around(torch.nn.Module):
    """As sentence-transformers has a model of transformers."""

    def __init__(self, inner: torch.nn.Module, *, is_trained: bool = False) -> None:
        super().__init__()
        self.inner, self.head = inner, torch.nn.Linear(2, 2).requires_grad_(is_trained)


@pytest.mark.parametrize("wrap", [lambda model: model, Around])
def test_of_an_adapter_that_was_added_what_transformers_writes_is_saved(wrap: Any, tmp_path: Path) -> None:
    """A checkpoint was the whole model, with names that the library does not read."""
    inner = injected()
    model = wrap(inner)
    inner.save_pretrained(tmp_path / "stock")
    stock = safetensors.torch.load_file(tmp_path / "stock" / "adapter_model.safetensors")
    adapter = adapter_of(model)
    assert adapter is not None
    own = adapter.weights(model)
    assert own.keys() == stock.keys() and all(torch.equal(own[name], stock[name]) for name in own)
    trained = {id(value) for value in model.parameters() if value.requires_grad}
    assert {id(value) for value in own.values()} == trained
    subject = SimpleNamespace(
        model=model, processing_class=None, _adapter=adapter, _manager=SimpleNamespace(scratch=tmp_path)
    )
    written = {path.name: path.read_bytes() for path in (tmp_path / "stock").iterdir()}
    assert configuration_files(subject) == {
        name: data for name, data in written.items() if name != "adapter_model.safetensors"
    }


def test_a_module_that_is_trained_besides_has_all_saved() -> None:
    assert adapter_of(Around(injected(), is_trained=True)) is None


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


def trainer(*, enabled: bool = True, stage: int = 2, **config: Any) -> Any:
    plugin = SimpleNamespace(zero_stage=stage, deepspeed_config=config)
    return SimpleNamespace(
        is_deepspeed_enabled=enabled,
        accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)),
        args=SimpleNamespace(per_device_train_batch_size=2, gradient_accumulation_steps=3, world_size=4),
        model="model",
        model_wrapped="wrapped",
    )


def test_the_engine_learns_how_a_step_is_cut() -> None:
    subject = trainer(train_batch_size=8, gradient_clipping=1.0)
    set_batch_shape(subject)
    assert subject.accelerator.state.deepspeed_plugin.deepspeed_config == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "train_batch_size": 24,
        "gradient_clipping": 1.0,
    }


def test_without_deepspeed_nothing_is_set() -> None:
    subject = trainer(enabled=False)
    set_batch_shape(subject)
    assert subject.accelerator.state.deepspeed_plugin.deepspeed_config == {}


def test_the_engine_is_tracked_once_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracked_model(trainer()) == "model"
    monkeypatch.setattr(wrapped_models, "is_engine", lambda model: model == "wrapped")
    assert tracked_model(trainer()) == "wrapped"


@pytest.mark.parametrize(("enabled", "fp16", "skips"), [(True, False, False), (True, True, True), (False, True, False)])
def test_bad_steps_are_part_of_training_only_while_a_loss_scale_is_searched_for(
    enabled: bool, fp16: bool, skips: bool
) -> None:
    subject = trainer(enabled=enabled)
    subject.accelerator.scaler, subject.args.fp16 = None, fp16
    assert wrapped_models.skips_bad_steps(subject) is skips
    subject.accelerator.scaler = object()
    assert wrapped_models.skips_bad_steps(subject)


@pytest.mark.parametrize(("syncs", "advanced"), [(True, 1), (False, 0)])
def test_a_schedule_of_deepspeeds_own_advances_in_skipped_steps(
    syncs: bool, advanced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, steps = trainer(), list[int]()
    subject.accelerator.sync_gradients = syncs
    subject.model_wrapped = SimpleNamespace(lr_scheduler=SimpleNamespace(step=lambda: steps.append(1)))
    wrapped_models.advance_schedule(subject)
    assert steps == [], "no engine"
    monkeypatch.setattr(wrapped_models, "is_engine", lambda model: True)
    wrapped_models.advance_schedule(subject)
    assert len(steps) == advanced
    subject.model_wrapped.lr_scheduler = None
    wrapped_models.advance_schedule(subject)


# -- configuration files -----------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    pass


class Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        Path(folder, "tokenizer.json").write_text("{}")


def files_of(model: Any, folder: Path, *, tokenizer: Any = None, is_fsdp: bool = False) -> dict[str, bytes]:
    manager = SimpleNamespace(scratch=folder)
    return configuration_files(
        SimpleNamespace(
            model=model, processing_class=tokenizer, is_fsdp_enabled=is_fsdp, _adapter=None, _manager=manager
        )
    )


def test_a_model_and_its_tokenizer(tmp_path: Path) -> None:
    model: Any = Model()
    model.config, model.generation_config = SmolLM3Config(), GenerationConfig()
    files = files_of(model, tmp_path, tokenizer=Tokenizer())
    assert files.keys() == {"config.json", "generation_config.json", "tokenizer.json"}
    assert json.loads(files["config.json"])["architectures"] == ["Model"]
    assert list(tmp_path.iterdir()) == []


def test_the_class_that_fsdp_puts_in_front_is_not_the_architecture(tmp_path: Path) -> None:
    class Front:
        pass

    model: Any = type("FSDPModel", (Front, Model), {})()
    model.config = SmolLM3Config()
    files = files_of(model, tmp_path, is_fsdp=True)
    assert json.loads(files["config.json"])["architectures"] == ["Model"]


def test_a_model_without_configuration_has_no_files(tmp_path: Path) -> None:
    assert files_of(Model(), tmp_path, is_fsdp=True) == {}
