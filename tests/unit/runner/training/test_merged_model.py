"""A LoRA checkpoint that is merged computes what the adapter computes on its base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from checkpointing.errors import CheckpointError
from runner.training.merged_model import merge

# PEFT reads an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
TOKENS = torch.arange(8)[None]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    for name in ("optimizer.pt", "tokenizer.json"):
        (tmp_path / "adapter" / name).write_text("{}")
    (tmp_path / "out").mkdir()
    return tmp_path / "adapter"


def test_a_number_that_the_type_does_not_hold_is_named(base: Path, adapter: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e5
    model.save_pretrained(base)
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' .* float16, .* --dtype bf16 or fp32"):
        merge(adapter, tmp_path / "out", None, torch.float16, 5_000)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16])
def test_transformers_loads_the_merged_model(
    base: Path, adapter: Path, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    out = tmp_path / "out"
    merge(adapter, out, None, dtype, 5_000)
    found = AutoModelForCausalLM.from_pretrained(out)
    assert found.dtype == (dtype or torch.bfloat16)
    precise = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    wanted = precise(TOKENS).logits
    logits = found(TOKENS).logits.float()
    assert torch.allclose(logits, wanted, atol=1e-5 if dtype is torch.float32 else 0.05)
    assert not torch.allclose(logits, AutoModelForCausalLM.from_pretrained(base)(TOKENS).logits.float(), atol=0.05)
    # Of each weight, one rounding.
    exact = precise.merge_and_unload().to(found.dtype).state_dict()
    assert all(torch.equal(value, exact[name]) for name, value in found.state_dict().items())
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= names
    assert not any(name.startswith(("adapter", "optimizer", "README")) for name in names)


@pytest.mark.parametrize(
    ("changes", "base_model", "reason"),
    [
        ({"base_model_name_or_path": None}, None, "does not name its base model; pass --base-model"),
        ({}, "/gone/model", "the base model '/gone/model' cannot be loaded: .*; pass its path as --base-model"),
    ],
)
def test_a_base_that_cannot_be_loaded_is_named(
    changes: dict[str, Any], base_model: str | None, reason: str, adapter: Path, tmp_path: Path
) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=reason):
        merge(adapter, tmp_path / "out", base_model, None, 10**9)


def test_a_quantized_base_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    path = base / "config.json"
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    with pytest.raises(CheckpointError, match="is quantized, and a merge would round again"):
        merge(adapter, tmp_path / "out", None, None, 10**9)


def test_a_model_is_no_adapter(base: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no adapter to merge; leave --merge out"):
        merge(base, tmp_path / "out", None, None, 10**9)


def test_code_of_the_base_is_not_run(base: Path, adapter: Path, tmp_path: Path) -> None:
    path = base / "config.json"
    automatic = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "mine", "auto_map": automatic}))
    (base / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        merge(adapter, tmp_path / "out", None, None, 10**9)
    assert not (tmp_path / "ran").exists()
