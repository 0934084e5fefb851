"""Which kind a state is of, and when that is found again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointing.errors import CheckpointError
from checkpointing.files import sharding
from checkpointing.manager.tracked import Tracked
from checkpointing.process.ranks import Ranks
from checkpointing.state import kinds
from checkpointing.state.kinds import KINDS, kind_of
from checkpointing.state.kinds import pipeline as pipeline_kind
from checkpointing.state.kinds import zero as zero_kind
from checkpointing.state.kinds.pipeline import PipelineState
from checkpointing.state.kinds.sharded import ShardedState
from checkpointing.state.kinds.state_kind import StateKind, WholeState
from checkpointing.state.train_state import TrainState


def test_a_model_that_is_sharded_after_it_was_tracked_is_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fully_shard` exchanges the parameters of a module in place."""
    model = torch.nn.Linear(2, 2)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(state.kind, WholeState)
    monkeypatch.setattr(sharding, "has_sharded", lambda given: given is model)
    assert isinstance(state.kind, ShardedState)


def test_a_stage_is_one_because_the_script_says_so() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert type(kind_of(model, optimizer)) is WholeState
    assert type(kind_of(model, optimizer, Ranks(), pipeline=True)) is PipelineState


@pytest.mark.parametrize("model", [None, [torch.nn.Linear(2, 2)], SimpleNamespace()])
def test_what_is_no_model_is_left_to_the_checks_of_models(model: Any) -> None:
    assert type(kind_of(model, None)) is WholeState


def test_an_engine_is_no_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was saved as if no pipeline had been asked for."""
    model = torch.nn.Linear(2, 2)
    for module in (pipeline_kind, zero_kind):
        monkeypatch.setattr(module, "is_engine", lambda given: given is model)
    with pytest.raises(CheckpointError, match="pipeline: model is a Linear; give the module of this rank's stage"):
        Tracked(Ranks()).track(model, None, None, None, {}, None, pipeline=True)


def test_a_kind_that_stays_is_made_once_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further line in the table is all that a new kind needs."""
    made = []

    class Engine(torch.nn.Linear):
        pass

    class OfAnEngine(StateKind):
        is_kept = True

        def __init__(self, model: Any, optimizer: Any, ranks: Ranks) -> None:
            super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks)
            made.append(self)

        @classmethod
        def matches(cls, model: Any, *, pipeline: bool) -> bool:
            return isinstance(model, Engine)

        def is_of(self, model: Any, optimizer: Any) -> bool:
            return model is self.model

    monkeypatch.setattr(kinds, "KINDS", (OfAnEngine, *KINDS))
    tracked, engine = Tracked(Ranks()), Engine(2, 2)
    for _ in range(2):
        tracked.track(engine, None, None, None, {}, None, pipeline=False)
        assert tracked.state.kind is made[0]
    other = torch.nn.Linear(2, 2)
    tracked.track(other, torch.optim.SGD(other.parameters(), lr=0.1), None, None, {}, None, pipeline=False)
    assert type(tracked.state.kind) is WholeState and len(made) == 1
