"""What training changes and no checkpoint holds is named; what is saved, or a library's own business, is not."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
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
    found = Coverage(lambda step: (roots, ()), lambda: covered or set(), lambda: without or set())
    found.begin()
    return found


@pytest.mark.parametrize("path", CHANGES)
def test_what_an_object_of_the_script_changes_is_named(path: str) -> None:
    own = Own()
    found = coverage({"own": own})
    assert found.changed(5) == []
    CHANGES[path](own)
    assert found.changed(5) == [path]


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
    assert found.changed(5) == ["model.calls"]


def test_what_is_left_out_is_not_named() -> None:
    own = Own()
    found = coverage({"own": SimpleNamespace(own=own)}, without={id(own)})
    own.count = 1
    assert found.changed(5) == []


def test_a_module_that_nothing_saves_is_named() -> None:
    trainer = SimpleNamespace(teacher=torch.nn.Sequential(torch.nn.Linear(2, 2)), count=0, _loss=torch.zeros(1))
    found = coverage({"Trainer": trainer})
    with torch.no_grad():
        trainer.teacher[0].weight.fill_(1.0)
        # A library's numbers count time, progress and the like.
        trainer.count, trainer._loss = 1, torch.ones(1)
    assert found.changed(5) == ["Trainer.teacher.0"]


def test_each_name_is_returned_at_one_save() -> None:
    own = Own()
    found = coverage({"own": own})
    own.count = 1
    assert [found.at_save(5) for _ in range(4)] == [["own.count"], [], None, []]
    own._private = 2
    # It is looked for at the first, second, fourth, eighth save.
    assert [found.at_save(5) for _ in range(4)] == [None, None, None, ["own._private"]]


def test_a_message_names_the_first_few_of_many() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed(["ema[0]", "ema[1]", "ema[2]", "own.table[0][1]"]) == "ema[…], own.table[…]"
    assert listed([str(number) for number in range(20)]) == "0, 1, 2, 3, 4, 5, 6, 7, and 12 more"


def test_looking_at_variables_keeps_none_of_them_alive() -> None:
    """A step's logits stayed in memory until the next save."""
    large = Own()
    gone = weakref.ref(large)
    assert script_variables().found["large"] is large
    number = 3
    del large
    assert gone() is None and number == 3


def test_objects_of_the_script_that_runs_are_found_and_what_a_step_computes_is_not() -> None:
    average, text = Own(), "text"
    for step in range(3):
        loss = torch.ones(1)
        found = script_variables(step).found
    assert found["average"] is average and not {"loss", "step", "text"} & found.keys() and loss is not None and text


def loop(end: int, look: Callable[[int], Any]) -> Any:
    """A loop with variables of every sort; calls `look` at the end of each step."""
    best, patience, log, recent, moving = 9.0, 0, list[float](), deque[float](maxlen=2), {"w": torch.zeros(2)}
    numbers, tables = itertools.cycle([1, 2, 3]), dict.fromkeys(range(100), 0.0)
    began, slow, found = time.monotonic(), 0, None
    for step in range(1, end + 1):
        value = 5.0 - step
        log.append(value)
        recent.append(value)
        mean = sum(recent) / len(recent)
        next(numbers)
        moving["w"].mul_(0.9).add_(step)
        tables[step] = value
        patience += value >= best
        best = min(best, mean)
        took, began = time.monotonic() - began, time.monotonic()
        slow += took > 9
        found = look(step)
    return found


def test_what_a_loop_carries_is_named_and_what_it_computes_or_logs_is_not() -> None:
    seen: list[Coverage] = []

    def look(step: int) -> list[str]:
        if not seen:
            # As where a loop begins: everything is there.
            seen.append(Coverage(script_variables, set, set))
            seen[0].begin()
            return []
        return seen[0].changed(step)

    names = {name.partition("[")[0] for name in loop(4, look)}
    assert {"best", "moving", "recent", "numbers", "tables"} <= names
    assert not {"log", "value", "took", "began", "step", "end", "slow"} & names


def namespace() -> type:
    class State:
        calls = 0

        def method(self) -> None:
            pass

    return State


def counted() -> Any:
    def count() -> None:
        count.calls += 1  # type: ignore[attr-defined]

    count.calls = 0  # type: ignore[attr-defined]
    return count


def test_classes_as_namespaces_and_attributes_of_functions_are_named() -> None:
    state, count = namespace(), counted()
    found = coverage({"state": state, "count": count})
    state.calls += 1  # type: ignore[attr-defined]
    count()
    assert found.changed(5) == ["count.calls", "state.calls"]


def test_an_item_of_a_large_container_is_named() -> None:
    """A hand-made average of 75 tensors was not."""

    class Average:
        def __init__(self) -> None:
            self.shadow = {str(number): torch.zeros(3) for number in range(75)}

    own = Average()
    found = coverage({"own": own})
    for tensor in own.shadow.values():
        tensor.add_(1)
    assert found.changed(5) == ["own.shadow"]


def test_how_far_an_iterator_of_the_script_is_counts() -> None:
    def numbers() -> Iterator[int]:
        at = 0
        while True:
            at += 1
            yield at

    class Holder:
        def __init__(self) -> None:
            self.numbers, self.cycle = numbers(), itertools.cycle([1, 2])

    own = Holder()
    next(own.numbers)
    found = coverage({"own": own})
    next(own.numbers)
    next(own.cycle)
    assert found.changed(5) == ["own.cycle", "own.numbers"]
