from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from runner.training.model import BaseWeights

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
