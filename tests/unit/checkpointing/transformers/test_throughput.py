"""Tokens per second between two log entries."""

from __future__ import annotations

import pytest
import torch

from checkpointing.transformers.callback import Throughput


def test_tokens_are_counted_where_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("checkpointing.transformers.callback.time.monotonic", lambda: now[0])
    throughput = Throughput(num_ranks=2)
    assert throughput.between_entries({"loss": 1.0}) == {}
    throughput.count({"input_ids": torch.zeros(5, 100)})
    throughput.count({"pixel_values": torch.zeros(5, 100)})
    throughput.count([torch.zeros(5, 100)])
    assert throughput.between_entries({"loss": 1.0}) == {}
    now[0] = 12.0
    throughput.count({"input_ids": torch.zeros(15, 100)})
    assert throughput.between_entries({"eval_loss": 1.0}) == {}
    assert throughput.between_entries({"loss": 1.0}) == {"tokens_per_s": 1500.0}
    # TRL's own count, without padding, takes precedence.
    now[0] = 13.0
    assert throughput.between_entries({"loss": 1.0, "num_tokens": 4100.0}) == {"tokens_per_s": 100.0}
    now[0] = 14.0
    assert throughput.between_entries({"loss": 1.0, "num_tokens": 50.0}) == {}
