"""What is saved of a PEFT model."""

from __future__ import annotations

from typing import Any

import peft
import torch

from checkpointing.transformers.wrapped_models import RunningStatistics, adapter_of


def with_adapter(*layers: torch.nn.Module) -> Any:
    return peft.get_peft_model(torch.nn.Sequential(*layers), peft.LoraConfig(r=2, target_modules=["0"]))


def test_of_a_plain_base_the_adapter_is_saved() -> None:
    """A base that is no model of transformers has no configuration with a name."""
    adapter = adapter_of(with_adapter(torch.nn.Linear(4, 4)))
    assert adapter is not None


def test_the_running_statistics_of_a_base_are_kept() -> None:
    """They were in no checkpoint of its adapter: a resumed run began with those of the base."""
    layers = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4, track_running_stats=False)
    trained, fresh = with_adapter(*layers), with_adapter(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    trained(torch.randn(8, 4))
    saved = RunningStatistics(trained).state_dict()
    assert len(saved) == 3 and adapter_of(trained) is not None
    RunningStatistics(fresh).load_state_dict(saved)
    assert all(torch.equal(value, saved[name]) for name, value in RunningStatistics(fresh).state_dict().items())


def test_a_model_without_an_adapter_has_none() -> None:
    assert adapter_of(torch.nn.Linear(2, 2)) is None
