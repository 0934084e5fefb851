"""What training changes and no checkpoint holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import EarlyStoppingCallback

from checkpointing.transformers.further_states import changed, uncovered


class Own:
    def __init__(self) -> None:
        self.count, self.average, self.odd = 0, torch.zeros(2), object()
        self.history: list[Any] = [1, {"a": None}]


def trainer(*callbacks: Any, **attributes: Any) -> Any:
    model = torch.nn.Linear(1, 1)
    handler = SimpleNamespace(callbacks=list(callbacks))
    return SimpleNamespace(callback_handler=handler, model=model, model_wrapped=model, **attributes)


def test_what_a_callback_of_the_script_changes_is_named() -> None:
    own = Own()
    subject = trainer(own)
    before = uncovered(subject, set())
    own.count, own.odd = 1, object()
    own.average += 1
    own.history[1]["a"] = 2
    assert changed(before, uncovered(subject, set())) == ["Own.average", "Own.count", "Own.history"]


def test_what_is_saved_is_not_named() -> None:
    own, stopping = Own(), EarlyStoppingCallback()
    subject = trainer(own, stopping)
    before = uncovered(subject, {id(own)})
    own.count, stopping.early_stopping_patience_counter = 1, 1
    subject.model.weight.data.fill_(3.0)
    assert changed(before, uncovered(subject, {id(own)})) == []


def test_of_a_trainer_only_what_holds_tensors_counts() -> None:
    subject = trainer(teacher=torch.nn.Linear(2, 2), generator=torch.Generator(), count=0, _private=torch.zeros(1))
    before = uncovered(subject, set())
    subject.teacher.weight.data.fill_(1.0)
    torch.rand((), generator=subject.generator)
    subject.count, subject._private = 1, torch.ones(1)
    names = changed(before, uncovered(subject, set()))
    assert names == ["SimpleNamespace.generator", "SimpleNamespace.teacher"]
