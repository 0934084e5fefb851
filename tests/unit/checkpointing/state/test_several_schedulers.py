"""Several schedulers are saved and restored together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from unit.checkpointing.state.test_train_state import network, point

from checkpointing.errors import CheckpointError
from checkpointing.state.several_schedulers import as_one
from checkpointing.state.train_state import TrainState


def made(kind: type) -> tuple[TrainState, list[Any]]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(model.parameters(), lr=0.5)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.9**step) for one in (optimizer, other)]
    given: Any = {"first": schedulers[0], "second": schedulers[1]} if kind is dict else kind(schedulers)
    return TrainState(model, optimizer, as_one(given), states={"other": other}), schedulers


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_each_continues_from_its_own_step(kind: type) -> None:
    """Also one that is not in step with training: accelerate steps it once for each process."""
    (written, schedulers), (read, others) = made(kind), made(kind)
    for one in schedulers:
        one.optimizer.step()
    for _ in range(3):
        schedulers[0].step()
        schedulers[1].step()
        schedulers[1].step()
    read.restore_optimizer(point(written.capture(readable=set())), 0)
    assert [one.last_epoch for one in others] == [3, 6]
    assert [one.get_last_lr() for one in others] == [one.get_last_lr() for one in schedulers]
    assert [one.optimizer.param_groups[0]["lr"] for one in others] == [one.get_last_lr()[0] for one in schedulers]


def test_others_are_refused() -> None:
    (written, _), (read, _) = made(list), made(dict)
    with pytest.raises(CheckpointError, match=r"of the schedulers \['0', '1'\], these are \['first', 'second'\]"):
        read.restore_optimizer(point(written.capture(readable=set())), 0)


def test_a_single_one_stays_itself() -> None:
    scheduler = object()
    assert as_one(scheduler) is scheduler and as_one(None) is None
