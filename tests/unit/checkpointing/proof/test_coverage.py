"""What training changes and no checkpoint holds is named; what is saved, or a library's own business, is not."""

from __future__ import annotations

import argparse
import enum
import importlib
import itertools
import multiprocessing
import queue
import re
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from checkpointing.process.carried import named_in_call
from checkpointing.proof.coverage import Clocks, Coverage, _is_of_clock, held_by, listed, script_variables, suspended


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
    assert {re.sub(r"\[\d\]$", "", name) for name in found.changed(5)} == {path.removesuffix("[0]")}


def test_what_is_saved_is_not_named_but_what_it_holds_besides_is() -> None:
    class Model(torch.nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    model = Model(1, 1)
    found = coverage({"model": model}, {id(model), *map(id, model.parameters())})
    model(torch.ones(1))
    model.weight.data.fill_(3.0)
    assert found.changed(5) == ["model.calls"]


def test_what_is_left_out_is_not_named() -> None:
    own = Own()
    found = coverage({"own": SimpleNamespace(own=own)}, without={id(own)})
    own.count = 1
    assert found.changed(5) == []


# As of a library.
Library: Any = type("Library", (), {"__module__": "transformers.trainer"})


def library(**attributes: Any) -> Any:
    made = Library()
    vars(made).update(attributes)
    return made


def test_a_module_that_nothing_saves_is_named() -> None:
    trainer = library(teacher=torch.nn.Sequential(torch.nn.Linear(2, 2)), count=0, _loss=torch.zeros(1))
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
    assert [found.at_save(5) for _ in range(3)] == [["own.count"], [], []]
    own._private = 2
    # It is looked for at the first saves, and then at every fourth.
    assert [found.at_save(5) for _ in range(2)] == [["own._private"], []]
    assert [found.at_save(5) for _ in range(11)] == [[], [], [], None, None, None, [], None, None, None, []]


def test_what_training_makes_is_named_when_it_is_first_seen() -> None:
    """A process that is killed between two saves would lose it unnamed."""
    own: Any = Own()
    found = coverage({"own": own})
    own.slow_weights = [torch.ones(2)]
    assert found.at_save(1) == ["own.slow_weights", "own.slow_weights[0]"]


def hooked(module: torch.nn.Module) -> None:
    count = itertools.count()
    calls = [0]

    def hook(*_: object) -> None:
        next(count)
        calls[0] += 1

    module.register_forward_hook(hook)


def namespaces() -> dict[str, Any]:
    local: Any = threading.local()
    local.value = 1
    return {
        "argparse.Namespace": argparse.Namespace(value=1),
        "SimpleNamespace": SimpleNamespace(value=1),
        "threading.local": local,
        "multiprocessing.Value": multiprocessing.Value("i", 1),
    }


@pytest.mark.parametrize("kind", namespaces())
def test_what_a_script_keeps_in_pythons_own_namespaces_is_named(kind: str) -> None:
    place = namespaces()[kind]
    found = Coverage(lambda step: ({"place": place}, ["place"]), set, set)
    found.begin()
    assert found.changed(1) == []
    place.value = 7
    assert found.changed(1) == ["place.value"]


def test_the_closures_of_hooks_are_looked_into() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    hooked(model[0])
    found = coverage({"model": model}, {id(model), id(model[0])})
    model(torch.ones(1))
    assert found.changed(1) == ["model.0._forward_hooks[0].calls[0]", "model.0._forward_hooks[0].count"]


CHANGES_OF_MODULES: dict[str, Callable[[Any], None]] = {
    "model.1.momentum": lambda model: setattr(model[1], "momentum", 0.5),
    "model.2.p": lambda model: setattr(model[2], "p", 0.5),
    "model.temperature": lambda model: setattr(model, "temperature", 0.5),
}


@pytest.mark.parametrize("path", CHANGES_OF_MODULES)
def test_numbers_of_modules_that_no_state_dict_has_are_compared(path: str) -> None:
    """Also of modules whose tensors are saved."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1), torch.nn.Dropout(0.1))
    model.temperature = 1.0
    saved = {id(one) for one in [*model.modules(), *model.parameters(), *model.buffers()]}
    found = coverage({"model": model}, saved)
    model.eval()
    model(torch.ones(2, 1))
    assert found.changed(1) == []
    CHANGES_OF_MODULES[path](model)
    assert found.changed(1) == [path]


def test_what_has_a_state_and_is_not_saved_is_named() -> None:
    """A second scheduler, which the script has not given to anybody."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    found = Coverage(lambda step: ({"plateau": plateau}, ["plateau"]), set, lambda: {id(optimizer)})
    found.begin()
    plateau.step(1.0)
    assert found.changed(1) == ["plateau"]


def test_a_full_ring_of_tuples_changes() -> None:
    own: Any = Own()
    own.replay = deque(((number, torch.ones(1)) for number in range(100)), maxlen=100)
    found = coverage({"own": own})
    own.replay.append((100, torch.ones(1)))
    assert found.changed(1) == ["own.replay"]


class Partial:
    def __init__(self) -> None:
        self.mean, self._count, self.best = torch.zeros(2), 0, 1.5

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.mean, "count": self._count}


def test_of_what_a_state_lacks_each_attribute_is_named() -> None:
    own = Partial()
    roots = {"own": own}
    found = Coverage(lambda step: (roots, ()), set, set, lambda: {id(own): held_by(own, own.state_dict())})
    found.begin()
    own.mean += 1
    own._count += 1
    assert found.changed(1) == []
    own.best = 0.5
    assert found.changed(1) == ["own.best"]


def test_a_message_names_the_first_few_of_many() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed(["ema[0]", "ema[1]", "ema[2]", "own.table[0][1]"]) == "ema[…], own.table[…]"
    assert (
        listed([str(number) for number in range(32)])
        == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, and 12 more"
    )


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


def from_the_first_step() -> Callable[[int], list[str]]:
    """Return what names the changes since its first call, from within the loop that calls it."""
    seen: list[Coverage] = []

    def look(step: int) -> list[str]:
        if not seen:
            # As where a loop begins: everything is there.
            seen.append(Coverage(script_variables, set, set))
            seen[0].begin()
            return []
        return seen[0].changed(step)

    return look


def loop(end: int, look: Callable[[int], Any]) -> Any:
    """A loop with variables of every sort; calls `look` at the end of each step."""
    best, patience, log, recent, moving = 9.0, 0, list[float](), deque[float](maxlen=2), {"w": torch.zeros(2)}
    numbers, tables = itertools.cycle([1, 2, 3]), dict.fromkeys(range(100), 0.0)
    began, slow, found = time.monotonic(), 0, None
    mean_in_place, counts, weights, updates = torch.zeros(2), np.zeros(3), list[torch.Tensor](), 0
    constant, batch = torch.ones(2), torch.zeros(2)
    for step in range(1, end + 1):
        mean_in_place.mul_(0.9).add_(constant)
        counts[step % 3] += 1
        weights.append(mean_in_place.clone())
        value = 5.0 - step
        updates += value < 9
        batch = torch.full((2,), float(step))
        batch.mul_(2)
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
    look = from_the_first_step()
    names = {name.partition("[")[0] for name in loop(4, look)}
    assert {"best", "moving", "recent", "numbers", "tables", "mean_in_place", "counts", "weights", "updates"} <= names
    assert not {"log", "value", "took", "began", "step", "end", "slow", "constant", "batch"} & names


SCRIPT = """
import torch
history, log, best = [], [], 9.0

def helper():
    return sum(history[-3:])

def worker(look):
    global best
    found = None
    for number in range(1, 5):
        best = min(best, 5.0 - number)
        found = look(number)
    return found

def main(look):
    found = None
    for number in range(1, 5):
        history.append(float(number))
        log.append(float(number))
        found = look(number)
    return found
"""


@pytest.mark.parametrize(("entry", "named", "not_named"), [("worker", "best", "log"), ("main", "history", "log")])
def test_global_variables_that_functions_use_are_looked_at_wherever_they_run(
    entry: str, named: str, not_named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread no frame of the module is being executed; a list that another function reads is no log."""
    (tmp_path / "own_script.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(str(tmp_path))
    script = importlib.import_module("own_script")
    look = from_the_first_step()
    found = [list[str]()]
    thread = threading.Thread(target=lambda: found.append(getattr(script, entry)(look)))
    thread.start()
    thread.join()
    names = {name.partition("[")[0].rpartition(".")[2] for name in found[-1]}
    assert named in names and not_named not in names
    del sys.modules["own_script"]


def test_a_number_is_a_clocks_only_if_a_clock_has_shown_it() -> None:
    """On a machine that was just started, a loss looks like seconds since its start."""
    now = Clocks.now()
    fresh = Clocks(now.wall, 1300.0, 1300.0)
    later = Clocks(now.wall + 60, 1360.0, 1360.0)
    readings = [now.wall + 30, 1310.0]
    assert [_is_of_clock(value, (fresh, later)) for value in [*readings, 5.2, 400.0, 1500.0]] == [
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("text", ["manager.step(step)", "manager.step(step + 1, metrics={'n': step})", "save(step)"])
def test_the_number_that_a_loop_passes_on_is_no_state(text: str) -> None:
    class Manager:
        def step(self, *_: object, **__: object) -> None:
            frame = sys._getframe(1)
            passed.append(named_in_call(frame.f_code, frame.f_lasti))

    passed: list[frozenset[str]] = []
    manager = Manager()
    names: dict[str, Any] = {"manager": manager, "save": manager.step}
    exec(f"step, updates = 3, 3\n{text}\n", names)
    assert "step" in passed[0] and "updates" not in passed[0]


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


def test_what_an_own_module_keeps_is_found_under_the_name_that_it_has_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`import helper as h`: its generator is in no variable of the script."""
    (tmp_path / "own_helper.py").write_text(
        "import random\nrng, ramp = random.Random(3), [1]\n\ndef draw():\n    return rng.random() * ramp[0]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    h = importlib.import_module("own_helper")
    found = script_variables().found
    assert found["h.rng"] is h.rng and found["h.ramp"] is h.ramp and "h.draw" not in found and "h.random" not in found
    del sys.modules["own_helper"]


# -- kinds that an independent tester found silent -------------------------------------------------------------------


def double(value: int) -> int:
    return 2 * value


class Keeper:
    """Holds one thing."""

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.functions = [double, len]


class Part(enum.Enum):
    FIRST = 1
    SECOND = 2


# Found elsewhere, too.
PARTS = list(Part)


class Table:
    """As of a library."""

    def __init__(self, rows: Iterable[int]) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> Table:
        return Table(self.rows[part])

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return np.array(self.rows)


Table.__module__ = "numpy"


class Steps(list[int]):
    at = 0


class Meta(type):
    made = 0


class Single(metaclass=Meta):
    pass


class Derived(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.count = 0

    @torch.no_grad()
    def decorated(self) -> None:
        self.scale = 1

    @property
    def tau(self) -> float:
        return self._tau

    @tau.setter
    def tau(self, value: float) -> None:
        self._tau = value


def numbered(x: int, *, state: dict[str, int] = {}) -> int:  # noqa: B006
    state["n"] = state.get("n", 0) + x
    return x


@pytest.mark.parametrize(
    ("make", "change", "named"),
    [
        (lambda: Keeper(double), lambda own: setattr(own, "value", len), "own.value"),
        (lambda: Keeper(Part.FIRST), lambda own: setattr(own, "value", Part.SECOND), "own.value"),
        (lambda: Keeper(torch.float32), lambda own: setattr(own, "value", torch.float64), "own.value"),
        (lambda: Keeper(Table(range(5000))), lambda own: own.value.rows.append(1), "own.value"),
        (lambda: Keeper(iter([1, 2])), lambda own: next(own.value), "own.value"),
        (lambda: Keeper(zip([1, 2], [3, 4], strict=True)), lambda own: next(own.value), "own.value"),
        (lambda: Keeper(bytearray(2)), lambda own: own.value.append(1), "own.value"),
        (lambda: Keeper(Steps([1])), lambda own: setattr(own.value, "at", 1), "own.value.at"),
        (lambda: Keeper({"a": 1}), lambda own: own.value.update(b=own.value.pop("a")), "own.value"),
        (lambda: Keeper([0] * 1000), lambda own: own.value.__setitem__(777, 1), "own.value"),
        (lambda: Keeper(torch.zeros(500, 16)), lambda own: own.value[321].fill_(1), "own.value"),
        (lambda: Keeper(np.zeros(500, "U1")), lambda own: own.value.__setitem__(3, "a"), "own.value"),
        (lambda: Keeper(queue.Queue()), lambda own: own.value.put(1), "own.value.queue"),
        (lambda: Keeper(np.random.default_rng(1)), lambda own: own.value.spawn(1), "own.value.spawn"),
        (lambda: Keeper(Single), lambda own: setattr(Meta, "made", Meta.made + 1), "own.value.made"),
        (lambda: Keeper(numbered), lambda own: own.value(1), "own.value.state[0]"),
        (Derived, lambda own: own.decorated(), "own.scale"),
        (Derived, lambda own: setattr(own, "tau", 2.0), "own._tau"),
        (Derived, lambda own: setattr(own, "weight_a", 2.0), "own.weight_a"),
    ],
)
def test_it_is_named(make: Callable[[], Any], change: Callable[[Any], object], named: str) -> None:
    own = make()
    found = coverage({"own": own})
    assert found.changed(1) == []
    change(own)
    assert named in found.changed(1)


def test_a_module_whose_mode_differs_or_that_has_another_hook_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    found = coverage({"model": model})
    # An evaluation changes all of them.
    model.eval()
    assert found.changed(1) == []
    model.train()
    model[1].eval()
    model[0].register_forward_hook(lambda *_: None)
    assert found.changed(1) == ["model (modules in training)", "model.0 (hooks)"]


def test_a_generator_that_no_variable_shows_is_found() -> None:
    def rows() -> Iterator[int]:
        held = [1]
        while True:
            held.append(1)
            yield len(held)

    drawing = zip(range(3), rows(), strict=False)
    next(drawing)
    name = "a generator of test_a_generator_that_no_variable_shows_is_found.<locals>.rows"
    assert name in suspended(())
    rows_in_memory: Any = [1, 2, 3]
    loader: Any = torch.utils.data.DataLoader(rows_in_memory)
    batches = iter(loader)
    next(batches)
    assert "the position in a DataLoader over list" in suspended(())
    assert "the position in a DataLoader over list" not in suspended({id(loader.dataset)})
