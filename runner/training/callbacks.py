"""Metrics that the bundled job measures while it trains."""

from __future__ import annotations

import math
import os
import re
import resource
import time
from typing import Any

import torch
from transformers import TrainerCallback

from checkpointing.host.environment import rank_settings
from checkpointing.process import device

# Dense bf16 or fp16 operations per second, from NVIDIA's data sheets. The first name that is part of a device's name
# applies.
_PEAK_FLOPS = {
    "B200": 2250e12,
    "H200 NVL": 836e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A30": 165e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "T4": 65e12,
}


class MetricsCallback(TrainerCallback):
    """Adds metrics to every log entry of rank 0 that the Trainer does not measure.

    It must precede callbacks that pass entries to a tracker. Checkpoints do not contain these metrics, so that the
    `log_history` of a resumed run equals that of an uninterrupted run.
    """

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._data_wait_s, self._stall_s, self._num_steps = 0.0, 0.0, 0
        self._attempt = rank_settings().attempt
        self._lost_steps = 0

    def watch(self, trainer: Any) -> None:
        """Measure how long a trainer waits for its batches, and become its first callback."""
        handler = trainer.callback_handler
        handler.callbacks.insert(0, handler.callbacks.pop(handler.callbacks.index(self)))
        self._trainer, draw = trainer, trainer.get_batch_samples

        def drawn(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return draw(*args, **kwargs)
            finally:
                self._data_wait_s += time.perf_counter() - began

        trainer.get_batch_samples = drawn

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compute the recomputed steps of the run."""
        settings = rank_settings()
        self._lost_steps = settings.lost_steps + max(settings.reached_step - state.global_step, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step."""
        self._num_steps += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Add the metrics to a log entry."""
        if not state.is_world_process_zero or not logs:
            return
        if "eval_loss" in logs:
            logs |= perplexities(logs)
        elif "loss" in logs:
            measured = {
                **perplexities(logs),
                **self._speed(logs, args.world_size),
                **_memory(),
                "attempt": self._attempt,
                "nodes": int(os.environ.get("GROUP_WORLD_SIZE", "1")),
                "lost_steps": self._lost_steps,
            }
            stall_s = self._trainer._manager.stall_s
            if self._num_steps:
                measured["data_wait_s"] = round(self._data_wait_s / self._num_steps, 5)
                measured["checkpoint_stall_s"] = round((stall_s - self._stall_s) / self._num_steps, 5)
            self._data_wait_s, self._stall_s, self._num_steps = 0.0, stall_s, 0
            measured |= _communication(self._trainer.model_wrapped)
            logs |= measured

    def _speed(self, logs: dict[str, float], world_size: int) -> dict[str, float]:
        """Return rates since the last entry; TRL counts the tokens of all ranks."""
        now, tokens, last = time.monotonic(), logs.get("num_tokens"), self._last
        if tokens is None:
            return {}
        self._last = (now, tokens)
        if last is None or now <= last[0]:
            return {}
        rate = (tokens - last[1]) / (now - last[0])
        speed = {"tokens_per_s": round(rate, 1), "tokens_per_s_per_rank": round(rate / world_size, 1)}
        peak = _peak_flops()
        if peak is not None:
            length = getattr(self._trainer.args, "max_length", None) or 0
            share = rate / world_size * flops_per_token(self._trainer.model, length) / peak
            speed["mfu"] = round(share, 4)
        return speed


def perplexities(logs: dict[str, Any]) -> dict[str, float]:
    """Return the perplexities (exponentials) of the losses in a log entry."""
    names = {"loss": "perplexity", "eval_loss": "eval_perplexity"}
    found = {name: logs[loss] for loss, name in names.items() if isinstance(logs.get(loss), (int, float))}
    return {name: round(math.exp(loss), 4) for name, loss in found.items() if loss < 700}


def flops_per_token(model: Any, length: int) -> float:
    """Estimate the operations of forward and backward pass per token (PaLM, arXiv 2204.02311, appendix B).

    These are 6 per parameter, and 12 x layers x width x tokens per sequence for attention. A frozen base counts fully.
    """
    # Multimodal models keep these numbers in the configuration of their text model.
    config = model.config.get_text_config()
    parameters = sum(map(_num_elements, model.parameters()))
    return float(6 * parameters + 12 * config.num_hidden_layers * config.hidden_size * length)


def _num_elements(parameter: Any) -> int:
    # bitsandbytes packs two 4-bit weights into a byte, and keeps the original shape.
    packed = getattr(parameter, "quant_state", None)
    return math.prod(packed.shape) if packed is not None else int(parameter.numel())


def _peak_flops() -> float | None:
    found = device.name_of() or ""
    # Whole words only: L40 contains L4.
    return next((flops for name, flops in _PEAK_FLOPS.items() if re.search(rf"\b{name}\b", found)), None)


def _memory() -> dict[str, float]:
    """Return the peak memory of this process so far in GB, and the utilisation of its GPU in percent."""
    on_device = device.peak_memory_bytes()
    if on_device is None:
        return {"peak_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 3)}
    busy = device.utilization_percent()
    return {"peak_memory_gb": round(on_device / 1e9, 3), **({"gpu_utilization": busy} if busy is not None else {})}


def _communication(model: Any) -> dict[str, float]:
    """Return the share of forward and backward pass in which a rank waits for gradients of others.

    DDP measures it in the first ten steps and in every hundredth one.
    """
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return {}
    data: dict[str, Any] = model._get_ddp_logging_data()
    forward, backward = data.get("avg_forward_compute_time", 0), data.get("avg_backward_compute_time", 0)
    communication = data.get("avg_backward_comm_time", 0)
    exposed = max(communication - data.get("avg_backward_compute_comm_overlap_time", 0), 0)
    total = forward + backward + exposed
    return {"communication_share": round(exposed / total, 4)} if total else {}
