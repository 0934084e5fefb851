"""What is left out of a tracker's run. The trackers themselves are in tests/integration/test_trackers.py."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import integration_utils as integrations

from checkpointing.transformers.trackers import continue_trackers, drop_repeated_lines

HISTORY = [
    {"step": 10, "epoch": 0.1, "loss": 3.0},
    {"step": 20, "epoch": 0.2, "loss": 2.0},
    {"step": 20, "epoch": 0.2, "eval_loss": 2.5},
]


class Stock(TrainerCallback):
    """Like wandb's."""

    def __init__(self, run: Any) -> None:
        self._wandb, self._initialized = SimpleNamespace(run=None, init=self._init), False
        self._made = run
        self.options: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, Any]]] = []

    def _init(self, **options: Any) -> None:
        self.options = options
        self._made.id = options["id"]
        self._wandb.module.run = self._made

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._wandb.init(project="p")

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        self.logged.append((state.global_step, logs))


def begin(monkeypatch: pytest.MonkeyPatch, run: Any, *, rank: int = 0) -> tuple[Stock, TrainerState]:
    monkeypatch.setattr(integrations, "WandbCallback", Stock)
    callback = Stock(run)
    continue_trackers([callback], "abc")
    state = TrainerState(log_history=HISTORY, global_step=20, is_world_process_zero=rank == 0)
    if rank:
        callback.on_log(None, state, None, logs={"loss": 1.0})
    else:
        callback.on_train_begin(None, state, None)
    return callback, state


def test_what_a_resumed_run_holds_is_left_out_and_what_is_missing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 20 was logged, its evaluation was still on its way."""
    summary = {"train/global_step": 20, "train/loss": 2.0, "train/epoch": 0.2, "eval/loss": 3.5}
    callback, state = begin(monkeypatch, SimpleNamespace(offline=False, resumed=True, summary=summary))
    assert callback.options == {"project": "p", "id": "abc", "resume": "allow"}
    assert callback.logged == [(20, {"epoch": 0.2, "eval_loss": 2.5})]
    state.global_step = 21
    callback.on_log(None, state, None, logs={"loss": 1.0})
    assert callback.logged[1:] == [(21, {"loss": 1.0})]


def test_a_new_run_gets_the_whole_history(monkeypatch: pytest.MonkeyPatch) -> None:
    callback, _ = begin(monkeypatch, SimpleNamespace(offline=False, resumed=False, summary={}))
    assert [(step, *logs) for step, logs in callback.logged] == [
        (10, "epoch", "loss"),
        (20, "epoch", "loss"),
        (20, "epoch", "eval_loss"),
    ]


def test_other_ranks_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    callback, _ = begin(monkeypatch, None, rank=1)
    assert callback.logged == [(20, {"loss": 1.0})] and not callback.options


def test_a_tracker_that_cannot_be_asked_logs_as_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    callback, state = begin(monkeypatch, SimpleNamespace(offline=True, settings=SimpleNamespace()))
    assert not callback.logged and "reading the tracker's entries failed" in caplog.text
    callback.on_log(None, state, None, logs={"loss": 2.0})
    assert callback.logged == [(20, {"loss": 2.0})]


def test_lines_of_recomputed_steps_leave_the_logs_of_frameworks(tmp_path: Path) -> None:
    of_llamafactory = [json.dumps({"current_steps": step, "loss": 1.0}) for step in range(1, 8)]
    of_swift = [json.dumps({"global_step/max_steps": f"{step}/12"}) for step in range(1, 8)]
    (tmp_path / "trainer_log.jsonl").write_text("\n".join([*of_llamafactory, '{"torn']))
    (tmp_path / "logging.jsonl").write_text("\n".join(['{"model_parameter_info": "x"}', *of_swift]) + "\n")
    (tmp_path / "other.jsonl").write_text("9\n")
    drop_repeated_lines(str(tmp_path), 5)
    assert (tmp_path / "trainer_log.jsonl").read_text().splitlines() == of_llamafactory[:5]
    assert (tmp_path / "logging.jsonl").read_text().splitlines()[1:] == of_swift[:5]
    assert (tmp_path / "other.jsonl").read_text() == "9\n" and len(list(tmp_path.iterdir())) == 3
    drop_repeated_lines(str(tmp_path / "none"), 5)
