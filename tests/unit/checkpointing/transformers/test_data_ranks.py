"""Which ranks of a trainer share their samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.agent.events import BatchShape
from checkpointing.transformers import job_shape
from checkpointing.transformers.job_shape import DataRanks, batch_shape


def trainer(rank: int, world_size: int, *, loaded: int | None = None, configured: int | None = None) -> Any:
    parallelism = SimpleNamespace(tp_size=configured) if configured is not None else None
    return SimpleNamespace(
        args=SimpleNamespace(process_index=rank, world_size=world_size),
        accelerator=SimpleNamespace(parallelism_config=parallelism),
        model=SimpleNamespace(_tp_size=loaded) if loaded is not None else SimpleNamespace(),
    )


@pytest.mark.parametrize("sizes", [{}, {"configured": 1}, {"loaded": 1}])
def test_without_tensor_parallelism_every_rank_has_its_own_samples(sizes: Any) -> None:
    assert [DataRanks.of(trainer(rank, 4, **sizes)) for rank in range(4)] == [DataRanks(rank, 4) for rank in range(4)]


@pytest.mark.parametrize("sizes", [{"loaded": 2}, {"configured": 2}, {"loaded": 2, "configured": 2}])
def test_the_ranks_of_a_group_have_the_same_samples(sizes: Any) -> None:
    found = [DataRanks.of(trainer(rank, 6, **sizes)) for rank in range(6)]
    assert [ranks.rank for ranks in found] == [0, 0, 1, 1, 2, 2]
    assert {(ranks.count, ranks.group_size, ranks.planned) for ranks in found} == {(3, 2, 3)}


def test_an_elastic_run_has_a_batch_for_the_ranks_that_were_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_shape, "rank_settings", lambda: SimpleNamespace(planned_ranks=8))
    assert DataRanks.of(trainer(0, 4, loaded=2)).planned == 4


def test_a_supervisor_learns_which_ranks_share() -> None:
    own = trainer(0, 4, loaded=2)
    own._train_batch_size, own.args.gradient_accumulation_steps = 3, 5
    assert batch_shape(own, 30) == BatchShape(micro_batch=3, accumulation=5, samples=30, model_ranks=2)
