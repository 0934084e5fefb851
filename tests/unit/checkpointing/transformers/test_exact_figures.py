"""Figures that do not depend on the number of ranks which measured them."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from thread_ranks import run_ranks
from torch.utils.data import DataLoader

from checkpointing.exact.tree import block_of
from checkpointing.rank.ranks import Ranks
from checkpointing.transformers.exact_figures import StepFigures, as_virtual_ranks, fill_last_batch, merge_evaluation


def trainer_of_trl() -> Any:
    return SimpleNamespace(_metrics={"train": defaultdict(list)}, _total_train_tokens=0)


def measure(trainer: Any, value: float) -> None:
    """Keep figures as `SFTTrainer.compute_loss` does."""
    trainer._metrics["train"]["entropy"].append(value)
    trainer._total_train_tokens += 10 * value
    trainer._metrics["train"]["num_tokens"] = [trainer._total_train_tokens]


def test_every_rank_has_the_figures_of_all_in_one_order() -> None:
    def train(ranks: Ranks) -> Any:
        trainer = trainer_of_trl()
        figures = StepFigures(trainer, ranks.gather)
        for step in range(2):
            figures.begin()
            with figures.of(None):
                measure(trainer, 99.0)
            for virtual_rank in block_of(ranks.rank, ranks.world_size, 5):
                for number in range(2):
                    with figures.of((number, virtual_rank)):
                        measure(trainer, 100.0 * step + 10 * number + virtual_rank)
            figures.end()
        return {"tokens": trainer._total_train_tokens, **trainer._metrics["train"]}

    expected = [100.0 * step + 10 * number + rank for step in range(2) for number in range(2) for rank in range(5)]
    for world_size in (1, 2, 3):
        for found in run_ranks(train, world_size):
            assert found == {
                "tokens": 10 * sum(expected),
                "num_tokens": [10 * sum(expected)],
                "entropy": expected,
            }


def test_a_micro_batch_that_fails_leaves_no_figures() -> None:
    trainer = trainer_of_trl()
    figures = StepFigures(trainer, lambda own: [own])
    with pytest.raises(RuntimeError), figures.of((0, 0)):
        measure(trainer, 1.0)
        raise RuntimeError
    assert trainer._metrics == {"train": {}} and trainer._total_train_tokens == 0


def test_which_trainers_keep_figures() -> None:
    assert StepFigures.are_kept_by(trainer_of_trl())
    assert not StepFigures.are_kept_by(SimpleNamespace())


def test_an_evaluation_has_each_batch_once() -> None:
    """Five batches; with two ranks, the first is evaluated a second time by the last."""

    def merge(ranks: Ranks) -> Any:
        rounds = -(-5 // ranks.world_size)
        mine = [float((number * ranks.world_size + ranks.rank) % 5) for number in range(rounds)]
        figures = {"entropy": mine, "num_tokens": [8.0]}
        merge_evaluation(figures, 5, ranks.gather)
        return figures

    for world_size in (1, 2, 3, 4):
        for found in run_ranks(merge, world_size):
            assert found == {"entropy": [0.0, 1.0, 2.0, 3.0, 4.0], "num_tokens": [8.0]}


@pytest.mark.parametrize(("drop_last", "expected"), [(False, [[0, 1, 2], [3, 4, 0]]), (True, [[0, 1, 2]])])
def test_the_last_batch_of_a_single_rank_is_filled(drop_last: bool, expected: list[list[int]]) -> None:
    rows: Any = list(range(5))
    loader = Accelerator(cpu=True).prepare(DataLoader(rows, batch_size=3, drop_last=drop_last))
    for _ in range(2):
        fill_last_batch(loader)
        assert [batch.tolist() for batch in loader] == expected
    assert loader.total_batch_size == 3


class Processes:
    num_processes = 2

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return torch.stack([own, own])

    gather_for_metrics = gather


def test_an_accelerator_stands_for_all_virtual_ranks() -> None:
    ranks, own = Processes(), torch.tensor(1.0)
    with as_virtual_ranks(ranks, 8):
        assert (ranks.num_processes, ranks.gather(own).numel()) == (8, 2)
    with pytest.raises(RuntimeError), as_virtual_ranks(ranks, 8, local=True):
        assert ranks.gather(own) is own and ranks.gather_for_metrics(own) is own
        raise RuntimeError
    assert (ranks.num_processes, ranks.gather_for_metrics(own).numel()) == (2, 2) and type(ranks) is Processes
