from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from checkpointing.process import device
from runner.config.schema import DataConfig
from runner.training.model import BaseWeights, choose_attention, trained_tokenizer
from runner.training.training_data import BUNDLED, load_training_data


def test_the_bundled_data_is_clean(tmp_path: Path) -> None:
    data, _ = load_training_data(DataConfig(), tmp_path, seed=0)
    assert data.column_names == ["prompt", "completion"] and len(data) >= 300
    prompts, completions = data["prompt"], data["completion"]
    assert len(set(prompts)) == len(prompts) and len(set(completions)) == len(completions)
    assert all(text.isascii() and text.strip() for text in [*prompts, *completions])
    assert BUNDLED.stat().st_size < 1_000_000


def test_the_tokenizer_is_cached_by_content_and_loses_nothing(tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": ["How do I light a fire?"], "completion": [" With dry tinder."]})
    first = trained_tokenizer(data, 400, tmp_path)
    folder = next(tmp_path.iterdir())
    made = folder.stat().st_mtime_ns
    again = trained_tokenizer(data, 400, tmp_path)
    assert list(tmp_path.iterdir()) == [folder] and folder.stat().st_mtime_ns == made
    text = "Feuer \u00fcber Eis? \n\t 100 %"
    assert first.decode(first(text)["input_ids"]) == text == again.decode(again(text)["input_ids"])
    assert {first.eos_token, first.pad_token} == {"<|im_end|>", "<|pad|>"}


@pytest.mark.parametrize(
    ("importable", "gpu", "capability", "bf16", "expected"),
    [
        (True, True, (9, 0), True, "flash_attention_2"),
        (True, True, (7, 5), True, "sdpa"),
        (True, True, (9, 0), False, "sdpa"),
        (False, True, (9, 0), True, "sdpa"),
        (True, False, None, True, "sdpa"),
    ],
)
def test_attention(
    importable: bool,
    gpu: bool,
    capability: tuple[int, int] | None,
    bf16: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("runner.training.model.is_flash_attn_2_available", lambda: importable)
    monkeypatch.setattr(device, "capability", lambda: capability if gpu else None)
    assert choose_attention("auto", bf16=bf16) == expected
    assert choose_attention("eager", bf16=bf16) == "eager"


CONFIG = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip


def model() -> Any:
    torch.manual_seed(3)
    return SmolLM3ForCausalLM(SmolLM3Config(**CONFIG))


def begin(weights: BaseWeights, step: int) -> None:
    weights.on_train_begin(None, SimpleNamespace(global_step=step), None)


def test_weights_that_nothing_has_replaced_are_fetched() -> None:
    whole, left_out = model(), model()
    weights = BaseWeights(left_out, model, torch.device("cpu"))
    state = torch.get_rng_state()
    begin(weights, 0)
    assert torch.equal(torch.get_rng_state(), state)
    found = left_out.state_dict()
    assert all(torch.equal(found[name], value) for name, value in whole.state_dict().items())
    # Weights that are one stay one; buffers are in no checkpoint, and were never taken away.
    assert left_out.lm_head.weight is left_out.model.embed_tokens.weight
    assert torch.equal(left_out.model.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq)


def test_what_a_checkpoint_has_replaced_is_not_loaded() -> None:
    resumed = model()
    weights = BaseWeights(resumed, lambda: pytest.fail("it was loaded"), torch.device("cpu"))
    resumed.load_state_dict(model().state_dict())
    begin(weights, 7)
    assert torch.equal(resumed.lm_head.weight, model().lm_head.weight)
