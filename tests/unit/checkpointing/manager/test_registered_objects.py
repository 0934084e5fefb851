"""What a script has registered with accelerate is a part of the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from helpers.small_training import Average
from unit.checkpointing.doubles import Connection, manager, options

from checkpointing.errors import CheckpointError
from checkpointing.manager.manager import CheckpointManager
from checkpointing.manager.registered_objects import RegisteredObjects


def prepared(*objects: Any) -> tuple[Any, torch.nn.Module, Any]:
    """An accelerator and what it has prepared, without its constructor, which sets up this process."""
    model = torch.nn.Linear(2, 2)
    optimizer: Any = AcceleratedOptimizer.__new__(AcceleratedOptimizer)
    optimizer.optimizer, optimizer.scaler = torch.optim.SGD(model.parameters(), lr=0.1), None
    accelerator: Any = Accelerator.__new__(Accelerator)
    accelerator._custom_objects, accelerator._optimizers = list(objects), [optimizer]
    return accelerator, model, optimizer


def begun(folder: Path, model: torch.nn.Module, optimizer: Any, **tracked: Any) -> CheckpointManager:
    own = manager(options(folder), Connection(folder))
    own.track(model=model, optimizer=optimizer, **tracked)
    own.begin(0)
    return own


def test_registered_objects_are_saved_by_their_order(tmp_path: Path) -> None:
    first, second = Average(torch.nn.Linear(1, 1)), Average(torch.nn.Linear(2, 2))
    _, model, optimizer = prepared(first, second)
    own = begun(tmp_path, model, optimizer)
    # As a trainer does before each save.
    own.track(model=model, optimizer=optimizer)
    assert own._tracked.state.states == {"registered_1": first, "registered_2": second}
    own.close()


def test_what_is_saved_anyway_is_not_saved_twice(tmp_path: Path) -> None:
    """Some register the scheduler, too."""
    model: torch.nn.Module = torch.nn.Linear(2, 2)
    scheduler = torch.optim.lr_scheduler.LinearLR(torch.optim.SGD(model.parameters(), lr=0.1))
    average, other = Average(model), Average(model)
    _, model, optimizer = prepared(scheduler, average, other)
    own = begun(tmp_path, model, optimizer, scheduler=scheduler, states={"average": average})
    assert own._tracked.state.states == {"average": average, "registered_3": other}
    own.close()


def test_those_of_another_accelerator_are_not_taken() -> None:
    accelerator, _, _ = prepared(Average(torch.nn.Linear(1, 1)))
    _, _, optimizer = prepared()
    assert RegisteredObjects(optimizer).states([]) == {}
    assert RegisteredObjects(optimizer.optimizer).states([]) == {} and len(accelerator._custom_objects) == 1


def test_what_is_registered_too_late_is_refused_by_the_next_save(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared()
    own = begun(tmp_path, model, optimizer)
    accelerator._custom_objects.append(Average(model))
    with pytest.raises(CheckpointError, match=r"1 objects were given to .*Register them before"):
        own.save(1, 1)
    own.close()
