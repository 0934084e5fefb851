"""What the default job reports while it trains."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from runner.training.events import EventSender


class ProgressCallback(TrainerCallback):
    """Tells the supervisor every log entry of rank 0: step, loss, tokens per second."""

    def __init__(self, sender: EventSender) -> None:
        self._sender = sender
        self._last: tuple[float, float] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self._sender.send("training_started", step=state.global_step, total_steps=state.max_steps)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        now, tokens = time.monotonic(), logs.get("num_tokens")
        rate = None
        if tokens is not None:
            if self._last is not None and now > self._last[0]:
                rate = round((tokens - self._last[1]) / (now - self._last[0]), 1)
            self._last = (now, tokens)
        self._sender.send(
            "log",
            step=state.global_step,
            loss=logs["loss"],
            learning_rate=logs.get("learning_rate"),
            grad_norm=logs.get("grad_norm"),
            tokens_per_s=rate,
        )
