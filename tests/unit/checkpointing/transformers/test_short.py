"""A rehearsal's trainer saves and evaluates often, publishes nothing, and sees the end of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from transformers import TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from checkpointing.manager.rehearsal import Rehearsal
from checkpointing.transformers.short import shorten

ROWS = [{"x": number} for number in range(1000)]


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def shortened(tmp_path: Path, data: Any = ROWS, evaluated: Any = None, **arguments: Any) -> Any:
    options: dict[str, Any] = {"report_to": "none", "use_cpu": True, "per_device_train_batch_size": 4} | arguments
    args = TrainingArguments(str(tmp_path / "out"), **options)
    callbacks = [object(), TensorBoardCallback.__new__(TensorBoardCallback)]
    handler = SimpleNamespace(callbacks=list(callbacks))
    trainer = SimpleNamespace(args=args, callback_handler=handler, train_dataset=data, eval_dataset=evaluated)
    trainer.remove_callback = handler.callbacks.remove
    shorten(trainer, Rehearsal(12, 4, str(tmp_path / "output")))
    return trainer


def test_saves_come_often_and_nothing_is_published(tmp_path: Path) -> None:
    trainer = shortened(tmp_path, push_to_hub=True, save_steps=500, save_total_limit=2)
    args = trainer.args
    assert (args.save_strategy, args.save_steps, args.save_total_limit) == (SaveStrategy.STEPS, 4, None)
    assert args.output_dir != str(tmp_path / "out") and not args.push_to_hub
    assert [type(one) for one in trainer.callback_handler.callbacks] == [object]


@pytest.mark.parametrize(("strategy", "steps"), [("no", None), ("epoch", 4), ("steps", 4)])
def test_a_job_that_evaluates_does_so_at_each_save(tmp_path: Path, strategy: str, steps: int | None) -> None:
    trainer = shortened(tmp_path, evaluated=ROWS, eval_strategy=strategy, eval_steps=100)
    assert (trainer.args.eval_strategy == IntervalStrategy.STEPS) == (steps is not None)
    assert steps is None or trainer.args.eval_steps == steps
    assert len(trainer.eval_dataset) == 16


@pytest.mark.parametrize("data", [ROWS, datasets.Dataset.from_list(ROWS)])
def test_an_epoch_ends_within_the_steps(tmp_path: Path, data: Any) -> None:
    assert len(shortened(tmp_path, data).train_dataset) == 4 * 8


@pytest.mark.parametrize("data", [ROWS[:5], Stream(), None])
def test_what_is_short_or_a_stream_is_left_as_it_is(tmp_path: Path, data: Any) -> None:
    assert shortened(tmp_path, data).train_dataset is data
