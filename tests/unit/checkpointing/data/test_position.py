"""The record of a position: round trip, and values that no position has."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from checkpointing.data.position import EpochStart, Position
from checkpointing.data.step_layout import StepLayout
from checkpointing.process import rng

POSITION = Position(
    epoch=2,
    consumed=7,
    order="0f",
    start=EpochStart(rng.host_state(), {"0.generator": torch.Generator().get_state()}, {"order.calls": 3}),
    generators={"0.generator": torch.Generator().get_state()},
    counters={"order.calls": 4},
    layout=StepLayout(2, 4, 1),
    seed=9,
    stream=rng.host_state(),
)


def test_a_position_survives_a_file_that_is_read_with_weights_only() -> None:
    file = io.BytesIO()
    torch.save(POSITION.to_state(), file)
    found = Position.from_state(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert repr(found.to_state()) == repr(POSITION.to_state())
    assert found.start is not None
    rng.set_host_state(dict(found.start.host))


def test_a_position_before_the_first_epoch_has_no_start() -> None:
    assert Position.from_state(Position(0, 0, seed=1).to_state()).start is None


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": -1},
        {"epoch": 1.0},
        {"consumed": True},
        {"consumed": "7"},
        {"start": [1]},
        {"start": {"host": {}, "owned": 1, "counters": {}}},
        {"owned_now": None},
        {"counters_now": [1]},
        {"layout": [1, 2]},
        {"layout": [1, 2, 0]},
        {"seed": None},
        {"seed": "x"},
    ],
)
def test_a_value_that_is_not_possible_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Position.from_state({**POSITION.to_state(), **changes})


def test_a_record_from_before_layouts_and_stateful_loaders_is_read() -> None:
    state = POSITION.to_state()
    for name in ("layout", "loader", "stream"):
        del state[name]
    found = Position.from_state(state)
    assert (found.consumed, found.layout, found.loader, found.stream) == (7, None, None, None)


@pytest.mark.parametrize("counts", [None, [], [1, 2], [1, 2, "3"], [1, 2, True], [0, 1, 1]])
def test_a_layout_is_three_positive_integers(counts: Any) -> None:
    with pytest.raises(ValueError, match="step layout"):
        StepLayout.from_list(counts)
    assert StepLayout.from_list([2, 3, 4]).samples_per_step == 24
