"""Every Trainer is made resilient when it begins to train: once, outermost, whatever its class overrides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from checkpointing.errors import CheckpointError
from checkpointing.transformers import every_trainer, resilient
from checkpointing.transformers.every_trainer import protect_trainers
from checkpointing.transformers.trainer import ResilientMixin


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


class Before(Trainer):
    """Defined before trainers are protected, with a `train` of its own."""

    calls = 0

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().train(*args, **kwargs)


@pytest.fixture(autouse=True)
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Trainers are protected, and afterwards as they were."""
    reasons: list[str] = []
    kinds = [Trainer, Before]
    before = [vars(kind)["train"] for kind in kinds]
    protect_trainers(reasons.append)
    yield reasons
    for kind, train in zip(kinds, before, strict=True):
        kind.train = train
    del Trainer.__init_subclass__


def trainer(folder: Path, kind: type[Trainer]) -> Any:
    rows = [{"x": torch.ones(2), "labels": torch.ones(1)} for _ in range(4)]
    arguments = TrainingArguments(str(folder), max_steps=2, save_steps=1, report_to="none", use_cpu=True)
    return kind(model=Model(), args=arguments, train_dataset=rows)


def test_a_stock_trainer_saves_through_a_manager(tmp_path: Path) -> None:
    made = trainer(tmp_path, Trainer)
    made.train()
    assert isinstance(made, ResilientMixin) and (tmp_path / "checkpoint-2" / "manifest.json").exists()


def test_an_overridden_train_is_called_once(tmp_path: Path) -> None:
    class After(Before):
        """Defined later, one level deeper."""

        more = 0

        def train(self, *args: Any, **kwargs: Any) -> Any:
            self.more += 1
            assert isinstance(self, ResilientMixin)
            return super().train(*args, **kwargs)

    made = trainer(tmp_path, After)
    result = made.train()
    assert (made.more, made.calls, result.global_step) == (1, 1, 2)
    assert type(made).__name__ == "ResilientAfter"


def test_a_trainer_that_the_script_has_made_resilient_is_left_alone(tmp_path: Path) -> None:
    made = resilient(trainer(tmp_path, Before))
    kind = type(made)
    made.train()
    assert type(made) is kind and made.calls == 1


def test_a_second_training_of_the_same_trainer_is_another_stage(tmp_path: Path) -> None:
    made = trainer(tmp_path, Trainer)
    made.train()
    kind = type(made)
    made.args.max_steps = 3
    made.train()
    assert type(made) is kind


def test_a_trainer_that_cannot_be_resilient_trains_as_it_is(
    tmp_path: Path, refused: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(trainer: Any) -> None:
        raise CheckpointError("FSDP1 is not supported")

    monkeypatch.setattr(every_trainer, "resilient", refuse)
    made = trainer(tmp_path, Before)
    assert made.train().global_step == 2 and made.calls == 1
    assert refused == ["Before cannot be made resilient: FSDP1 is not supported"]
