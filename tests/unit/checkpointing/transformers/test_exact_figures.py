"""Figures that do not depend on the number of ranks which measured them."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from helpers.thread_ranks import run_ranks
from torch.utils.data import BatchSampler, DataLoader

from checkpointing.data.dealing import block_of
from checkpointing.process.ranks import Ranks
from checkpointing.transformers.exact_figures import EvaluationFigures, Figures, fill_last_batch


def trainer_of_trl() -> Any:
    return SimpleNamespace(_metrics={"train": defaultdict(list), "eval": defaultdict(list)}, _total_train_tokens=0)


def measure(trainer: Any, value: float) -> None:
    """Keep figures as trainers of TRL do; some have no value of each micro-batch."""
    figures = trainer._metrics["train"]
    figures["entropy"].append(value)
    if value % 2:
        figures["odd"].append(value)
    trainer._total_train_tokens += 10 * value
    figures["num_tokens"] = [trainer._total_train_tokens]


def test_every_rank_has_the_figures_of_all_in_one_order() -> None:
    def train(ranks: Ranks) -> Any:
        trainer = trainer_of_trl()
        figures = Figures(trainer, "train")
        for step in range(2):
            with figures.of(None):
                measure(trainer, 99.0)
            for virtual_rank in block_of(ranks.rank, ranks.world_size, 5):
                for number in range(2):
                    with figures.of((number, virtual_rank)):
                        measure(trainer, 100.0 * step + 10 * number + virtual_rank)
            figures.merge(ranks.gather)
        return {"tokens": trainer._total_train_tokens, **trainer._metrics["train"]}

    expected = [100.0 * step + 10 * number + rank for step in range(2) for number in range(2) for rank in range(5)]
    for world_size in (1, 2, 3):
        for found in run_ranks(train, world_size):
            assert found == {
                "tokens": 10 * sum(expected),
                "num_tokens": [10 * sum(expected)],
                "entropy": expected,
                "odd": [value for value in expected if value % 2],
            }


def test_a_micro_batch_that_fails_leaves_no_figures() -> None:
    trainer = trainer_of_trl()
    with pytest.raises(RuntimeError), Figures(trainer, "train").of((0, 0)):
        measure(trainer, 1.0)
        raise RuntimeError
    assert trainer._metrics["train"] == {} and trainer._total_train_tokens == 0


def test_which_trainers_keep_figures() -> None:
    assert Figures.are_kept_by(trainer_of_trl())
    assert not Figures.are_kept_by(SimpleNamespace())


def loader_of(ranks: Ranks) -> Any:
    """As accelerate prepares it: five batches, of which some are repeated so that ranks have equally many."""
    sampler = BatchSamplerShard(BatchSampler(range(10), 2, drop_last=False), ranks.world_size, ranks.rank)
    return SimpleNamespace(base_dataloader=None, batch_sampler=sampler)


@pytest.mark.parametrize("prepared", [True, False])
def test_an_evaluation_has_each_batch_once(prepared: bool) -> None:
    """A loader that accelerate did not prepare gives all batches to each rank."""

    def evaluate(ranks: Ranks) -> Any:
        trainer = trainer_of_trl()
        figures = trainer._metrics["eval"]
        # Of a prediction, which TRL does not log by itself.
        figures["entropy"].append(7.0)
        loader = loader_of(ranks) if prepared else SimpleNamespace(batch_sampler=None)
        evaluation = EvaluationFigures(trainer, loader, ranks.rank, ranks.world_size)
        for batch in loader.batch_sampler if prepared else [[2 * number] for number in range(5)]:
            with evaluation.of_next():
                figures["entropy"].append(batch[0] / 2)
                if batch[0] % 4:
                    figures["some"].append(batch[0] / 2)
                figures["num_tokens"] = [8.0]
        evaluation.merge(ranks.gather)
        trainer._total_train_tokens = 8.0
        return figures

    for world_size in (1, 2, 3, 4):
        for found in run_ranks(evaluate, world_size):
            assert isinstance(found, dict) and found["entropy"] == [7.0, 0.0, 1.0, 2.0, 3.0, 4.0]
            assert found["some"] == [1.0, 3.0] and len(found["num_tokens"]) == 1


@pytest.mark.parametrize(("drop_last", "expected"), [(False, [[0, 1, 2], [3, 4, 0]]), (True, [[0, 1, 2]])])
def test_the_last_batch_of_a_single_rank_is_filled(drop_last: bool, expected: list[list[int]]) -> None:
    rows: Any = list(range(5))
    loader = Accelerator(cpu=True).prepare(DataLoader(rows, batch_size=3, drop_last=drop_last))
    for _ in range(2):
        fill_last_batch(loader)
        fill_last_batch(SimpleNamespace())
        assert [batch.tolist() for batch in loader] == expected
    assert loader.total_batch_size == 3
