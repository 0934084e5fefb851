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


def test_names_of_states_must_be_free(tmp_path: Path) -> None:
    own = manager(options(tmp_path), Connection(tmp_path))
    model, optimizer = network()
    with pytest.raises(ValueError, match="optimizer"):
        own.track(model=model, optimizer=optimizer, states={"optimizer": model})
