"""Cases that test the harness itself; they are not in the table."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from compatibility import tiny
from compatibility.ranks import Run
from compatibility.table import case
from transformers import Trainer

from checkpointing.errors import CheckpointError


class _Counting(tiny.Rows):
    """What a sample holds depends on how many were read before; nobody saves that."""

    def __init__(self) -> None:
        super().__init__()
        self._reads = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(super().__getitem__(index))
        self._reads += 1
        return {**row, "input_ids": [6 + self._reads, *row["input_ids"][1:]]}


@case("harness/data set that cannot be resumed", in_table=False, ranks=1, stock=True)
def _data_set(run: Run) -> None:
    run.train(Trainer(tiny.gpt2(), tiny.arguments(run), data_collator=tiny.collate, train_dataset=_Counting()))


@case("harness/state that nobody saves", in_table=False, ranks=1)
def _state(run: Run) -> None:
    model = tiny.Perceptron()
    optimizer = torch.optim.AdamW(model.parameters())
    average = [0.0]
    manager = run.manager(model=model, optimizer=optimizer)
    for step, _ in run.steps(manager):
        average[0] += step
        manager.step(step + 1)
    manager.close()
    run.finish(model=model, average=average)


@case("harness/batches that resilient changes", in_table=False, ranks=1, stock=True)
def _changed(run: Run) -> None:
    rows = tiny.Rows()
    rows.rows = rows.rows[::-1] if run.is_resilient else rows.rows
    run.train(Trainer(tiny.gpt2(), tiny.arguments(run), data_collator=tiny.collate, train_dataset=rows))


@case("harness/error", in_table=False, ranks=1)
def _error(run: Run) -> None:
    raise KeyError("nothing of this name")


@case("harness/refusal", in_table=False)
def _refusal(run: Run) -> None:
    raise CheckpointError("this is not supported; use that")


@case("harness/refusal at the restart", in_table=False, ranks=1)
def _late_refusal(run: Run) -> None:
    if run.is_restarted:
        raise CheckpointError("now it is not supported")
    for step in range(10):
        run.begin_stage(run.output_dir) if step == 0 else None
        (run.folder / "output" / "checkpoint-6").mkdir(parents=True, exist_ok=True)
        run.step_begins(step)


@case("harness/hang", in_table=False, timeout_s=2)
def _hang(run: Run) -> None:
    if run.rank == 1:
        time.sleep(60)


@case("harness/rank that dies", in_table=False)
def _death(run: Run) -> None:
    if run.rank == 1:
        os._exit(3)
    time.sleep(60)


@case("harness/mismatch", in_table=False, ranks=1)
def _mismatch(run: Run) -> None:
    run.expect_equal("weights", {"a": torch.zeros(2)}, {"a": torch.ones(2)})


@case("harness/package that nobody has", in_table=False, needs=("no_such_package",))
def _missing(run: Run) -> None:
    raise NotImplementedError
