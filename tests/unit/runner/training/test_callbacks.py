from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from checkpointing.host.environment import SETTINGS_ENV, RankSettings
from checkpointing.process import device
from runner.training import callbacks


def test_perplexity_is_e_to_the_loss() -> None:
    found = callbacks.perplexities({"loss": 1.5, "eval_loss": 2.0, "grad_norm": 3.0})
    assert found == {"perplexity": round(math.exp(1.5), 4), "eval_perplexity": round(math.exp(2.0), 4)}
    assert callbacks.perplexities({"loss": 1e6}) == {} == callbacks.perplexities({"loss": "?"})


def test_operations_of_a_token() -> None:
    """6 per parameter, and twice two products of the attention for each layer, thrice with the backward."""
    config = SmolLM3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = SmolLM3ForCausalLM(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert callbacks.flops_per_token(model, 96) == 6 * parameters + 12 * 2 * 32 * 96
    # Packed as bitsandbytes does it, two weights in a byte.
    weight: Any = model.lm_head.weight
    packed: Any = torch.nn.Parameter(torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
    packed.quant_state = SimpleNamespace(shape=weight.shape)
    assert callbacks._num_elements(packed) == weight.numel() == callbacks._num_elements(weight)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("AMD Instinct MI300X", None),
        ("Tesla T4", 65e12),
        ("?", None),
    ],
)
def test_peak_of_a_device(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "name_of", lambda: name)
    assert callbacks._peak_flops() == peak


def test_what_is_measured_is_added_to_the_entry_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, seen = callbacks.MetricsCallback(), callbacks.MetricsCallback()
    handler = SimpleNamespace(callbacks=[seen, metrics])
    trainer = SimpleNamespace(
        callback_handler=handler,
        get_batch_samples=lambda: "batch",
        model_wrapped=None,
        model=None,
        _manager=SimpleNamespace(stall_s=0.5),
    )
    metrics.watch(trainer)
    assert handler.callbacks == [metrics, seen] and trainer.get_batch_samples() == "batch"
    args, state = SimpleNamespace(world_size=2), SimpleNamespace(is_world_process_zero=True, global_step=5)
    times = iter([10.0, 12.0])
    clock = SimpleNamespace(monotonic=lambda: next(times), perf_counter=time.perf_counter)
    monkeypatch.setattr(callbacks, "time", clock)
    control: Any = None
    monkeypatch.setenv(SETTINGS_ENV, RankSettings(lost_steps=3, reached_step=9).to_json())
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    state.max_steps = 7
    metrics.on_train_begin(args, state, control)
    for tokens in (1000, 1400):
        metrics.on_step_end(args, state, control)
        logs = {"loss": 2.0, "num_tokens": tokens}
        metrics.on_log(args, state, control, logs)
        trainer._manager.stall_s += 0.25
    # Three before this attempt, and from the step that the last one had finished back to where this one starts.
    assert logs["lost_steps"] == 3 + 9 - 5 and logs["checkpoint_stall_s"] == 0.25
    assert logs["tokens_per_s"] == 200.0 and logs["tokens_per_s_per_rank"] == 100.0
    assert logs["data_wait_s"] >= 0 and logs["peak_memory_gb"] > 0 and logs["attempt"] == 0 and logs["nodes"] == 3
    state.is_world_process_zero = False
    logs = {"loss": 1.0}
    metrics.on_log(args, state, control, logs)
    assert logs == {"loss": 1.0}
