"""What rank 0 reports to a supervisor."""

from __future__ import annotations

import resource
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointing.agent.events import BatchShape
from checkpointing.manager import reporter
from checkpointing.manager.reporter import Reporter, is_finite


def reporting(*, is_first: bool = True) -> tuple[Reporter, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    client: Any = SimpleNamespace(announce=lambda event: events.append(event.to_dict()))
    return Reporter(client, is_first=is_first), events


def test_only_rank_0_reports() -> None:
    own, events = reporting(is_first=False)
    own.training_started(3, 10, 0.5)
    own.batch_shape(BatchShape(micro_batch=4, accumulation=2))
    own.metrics(4, {"loss": 1.0})
    own.metrics_of_every_step(4, {"loss": 1.0})
    assert events == []


def test_restoring_is_reported_where_it_took_time() -> None:
    own, events = reporting()
    own.training_started(3, 10, 0.12345)
    own.training_started(0, None, 0.0)
    assert [event["event"] for event in events] == ["training_started", "restored", "training_started"]
    assert events[1]["seconds"] == 0.123


def test_metrics_that_are_not_finite_numbers_are_left_out() -> None:
    own, events = reporting()
    own.metrics(4, {"loss": torch.tensor(1.5), "grad_norm": float("nan"), "epoch": 2, "note": "text", "flag": True})
    own.metrics(4, {"eval_loss": 2.0})
    own.metrics(4, {"runtime": 2.0})
    assert events[0].pop("peak_memory_gb") > 0
    assert events == [
        {"event": "log", "step": 4, "loss": 1.5, "epoch": 2.0},
        {"event": "evaluated", "step": 4, "eval_loss": 2.0},
    ]


def test_every_log_entry_has_the_peak_memory_of_the_process() -> None:
    """The memory chart was empty for all but the bundled job."""
    own, events = reporting()
    own.metrics(4, {"loss": 1.0})
    own.metrics(5, {"loss": 1.0, "peak_memory_gb": 7.5})
    own.metrics(5, {"eval_loss": 1.0})
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    assert 0.5 * peak_gb < events[0]["peak_memory_gb"] <= peak_gb + 0.001
    assert events[1]["peak_memory_gb"] == 7.5 and "peak_memory_gb" not in events[2]


def test_evaluations_say_what_the_best_step_is_chosen_by() -> None:
    own, events = reporting()
    own.metrics(4, {"eval_f1": 0.5}, "eval_f1", True)
    own.metrics(4, {"eval_a_loss": 2.0}, None, None)
    assert events == [
        {"event": "evaluated", "step": 4, "eval_f1": 0.5, "best_by": "eval_f1", "higher_is_better": True},
        {"event": "evaluated", "step": 4, "eval_a_loss": 2.0},
    ]


def test_metrics_of_every_step_are_reported_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    own, events = reporting()
    for step, now in enumerate((10.0, 10.5, 11.0, 11.2)):
        monkeypatch.setattr(reporter, "time", SimpleNamespace(monotonic=lambda now=now: now))
        own.metrics_of_every_step(step, {"loss": 1.0})
    own.metrics_of_every_step(9, None)
    assert [event["step"] for event in events] == [0, 2]


@pytest.mark.parametrize(
    ("value", "finite"),
    [(1, True), (0.5, True), (torch.ones(1), True), (torch.ones(2), False), (float("inf"), False), (True, False)],
)
def test_finite_numbers(value: object, finite: bool) -> None:
    assert is_finite(value) is finite
