"""What training changes and no checkpoint holds is named; what is saved, or a library's own business, is not."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from checkpointing.proof.coverage import Coverage, listed, script_variables


class Own:
    def __init__(self) -> None:
        self.count, self.average, self.later, self.odd = 0, torch.zeros(2), None, object()
        self.history: list[Any] = [1, {"a": None}]
        self.table = np.zeros(4)
        self._private = 0.5
        self.inner = SimpleNamespace(best=0.0)


CHANGES: dict[str, Callable[[Own], Any]] = {
    "own.count": lambda own: setattr(own, "count", 1),
    "own.average": lambda own: own.average.add_(1),
    "own.later": lambda own: setattr(own, "later", torch.ones(1)),
    "own.history[1][0]": lambda own: own.history[1].update(a=2),
    "own.history": lambda own: own.history.append(3),
    "own.table": lambda own: own.table.__iadd__(1),
    "own._private": lambda own: setattr(own, "_private", 0.25),
}


def coverage(roots: dict[str, object], covered: set[int] | None = None, without: set[int] | None = None) -> Coverage:
    found = Coverage(lambda: roots, lambda: covered or set(), lambda: without or set())
    found.begin()
    return found


@pytest.mark.parametrize("path", CHANGES)
def test_what_an_object_of_the_script_changes_is_named(path: str) -> None:
    own = Own()
    found = coverage({"own": own})
    assert found.changed() == []
    CHANGES[path](own)
    assert found.changed() == [path]


def test_what_is_saved_is_not_named_but_what_it_holds_besides_is() -> None:
    class Model(torch.nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    model = Model(1, 1)
    found = coverage({"model": model}, {id(model)})
    model(torch.ones(1))
    model.weight.data.fill_(3.0)
    assert found.changed() == ["model.calls"]


def test_what_is_left_out_is_not_named() -> None:
    own = Own()
    found = coverage({"own": SimpleNamespace(own=own)}, without={id(own)})
    own.count = 1
    assert found.changed() == []


def test_a_module_that_nothing_saves_is_named() -> None:
    trainer = SimpleNamespace(teacher=torch.nn.Sequential(torch.nn.Linear(2, 2)), count=0, _loss=torch.zeros(1))
    found = coverage({"Trainer": trainer})
    with torch.no_grad():
        trainer.teacher[0].weight.fill_(1.0)
        # A library's numbers count time, progress and the like.
        trainer.count, trainer._loss = 1, torch.ones(1)
    assert found.changed() == ["Trainer.teacher.0"]


def test_each_name_is_returned_at_one_save() -> None:
    own = Own()
    found = coverage({"own": own})
    own.count = 1
    assert [found.at_save() for _ in range(4)] == [["own.count"], [], [], []]
    own._private = 2
    # It is looked for at the first, second, fourth, eighth save.
    assert [found.at_save() for _ in range(4)] == [[], [], [], ["own._private"]]


def test_a_message_names_the_first_few_of_many() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed([str(number) for number in range(20)]) == "0, 1, 2, 3, 4, 5, 6, 7, and 12 more"


def test_looking_at_variables_keeps_none_of_them_alive() -> None:
    """A step's logits stayed in memory until the next save."""
    large = Own()
    gone = weakref.ref(large)
    assert script_variables()["large"] is large
    number = 3
    del large
    assert gone() is None and number == 3


def test_objects_of_the_script_that_runs_are_found_and_what_a_step_computes_is_not() -> None:
    average, loss, step, text = Own(), torch.ones(1), 3, "text"

    def loop() -> dict[str, object]:
        inner = Own()
        return {**script_variables(), "checked": inner}

    found = loop()
    assert found["average"] is average and found["inner"] is found["checked"]
    assert not {"loss", "step", "text"} & found.keys() and loss is not None and step and text
