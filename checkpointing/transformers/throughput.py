"""Tokens per second of all ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch


class Throughput:
    """Counts token ids, and computes the rate between two log entries."""

    def __init__(self, num_ranks: int = 1) -> None:
        """Assume that every data parallel rank, of which there are `num_ranks`, has as many tokens as this one."""
        self._num_ranks = num_ranks
        # Ids that all ranks have computed, padding included.
        self._num_ids = 0
        self._last: tuple[float, float] | None = None

    def count(self, inputs: Any) -> None:
        """Count the ids of a micro-batch."""
        ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
        if isinstance(ids, torch.Tensor):
            self._num_ids += ids.numel() * self._num_ranks

    def between_entries(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Return `tokens_per_s` since the last log entry with a loss; empty if it is not known.

        TRL counts tokens, and so does the Trainer on request; their count, without padding, takes precedence.
        """
        tokens = logs.get("num_tokens", logs.get("num_input_tokens_seen", self._num_ids or None))
        if "loss" not in logs or not isinstance(tokens, (int, float)):
            return {}
        now, last = time.monotonic(), self._last
        self._last = (now, tokens)
        if last is None or now <= last[0] or tokens < last[1]:
            return {}
        return {"tokens_per_s": round((tokens - last[1]) / (now - last[0]), 1)}
