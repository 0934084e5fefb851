"""What is tracked, and what warnings say of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.small_checkpoint import network
from unit.checkpointing.doubles import Connection, manager, options


def test_the_state_of_communication_hooks_is_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = manager(options(tmp_path), Connection(tmp_path))
    model = torch.nn.Linear(1, 1)
    own.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
    own._tracked._hook_states = ["PowerSGDState"]
    own.begin(0)
    own.close()
    assert "PowerSGDState" in caplog.text


@pytest.mark.parametrize(("states", "is_said"), [({}, True), ({"other": torch.nn.Linear(2, 2)}, False)])
def test_parameters_that_nothing_saves_are_counted_in_a_warning(
    states: dict[str, torch.nn.Module], is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = manager(options(tmp_path), Connection(tmp_path))
    model, other = torch.nn.Linear(1, 1), states.get("other", torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()])
    own.track(model=model, optimizer=optimizer, states=states)
    own.begin(0)
    own.close()
    assert ("trains 2 parameters that are not in `model`" in caplog.text) is is_said


def test_names_of_states_must_be_free(tmp_path: Path) -> None:
    own = manager(options(tmp_path), Connection(tmp_path))
    model, optimizer = network()
    with pytest.raises(ValueError, match="optimizer"):
        own.track(model=model, optimizer=optimizer, states={"optimizer": model})
