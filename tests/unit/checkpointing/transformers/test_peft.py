"""What is saved of a PEFT model."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch

from checkpointing.transformers.peft import adapter_of


def with_adapter(*layers: torch.nn.Module) -> Any:
    return peft.get_peft_model(torch.nn.Sequential(*layers), peft.LoraConfig(r=2, target_modules=["0"]))


def test_of_a_plain_base_the_adapter_is_saved() -> None:
    """A base that is no model of transformers has no configuration with a name."""
    adapter = adapter_of(with_adapter(torch.nn.Linear(4, 4)))
    assert adapter is not None


@pytest.mark.parametrize("tracks", [True, False])
def test_of_a_base_that_training_changes_the_whole_model_is_saved(tracks: bool) -> None:
    """The running statistics of BatchNorm were in no checkpoint."""
    model = with_adapter(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4, track_running_stats=tracks))
    assert (adapter_of(model) is None) is tracks


def test_a_model_without_an_adapter_has_none() -> None:
    assert adapter_of(torch.nn.Linear(2, 2)) is None
