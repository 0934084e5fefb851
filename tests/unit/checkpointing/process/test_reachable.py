"""Searches find what a script keeps wherever it keeps it, and end whatever it keeps."""

from __future__ import annotations

import functools
import logging
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from checkpointing.process.reachable import is_own_module, reachable

at_module_level = np.random.default_rng(0)
unused = np.random.default_rng(1)


class Jitter:
    def __init__(self, rng: Any) -> None:
        self.rng = rng


class OfTheClass:
    rng = random.Random(3)


class Slotted:
    __slots__ = ("rng",)

    def __init__(self, rng: Any) -> None:
        self.rng = rng


def by_global(index: int) -> float:
    return float(at_module_level.normal())


def by_another_function(index: int) -> float:
    return by_global(index)


class ByMethod:
    def __getitem__(self, index: int) -> float:
        return by_another_function(index)


def by_closure(rng: Any) -> Callable[[int], Any]:
    def draw(index: int) -> Any:
        return rng.normal()

    return draw


def by_default(rng: Any) -> Callable[..., Any]:
    def draw(index: int, own: Any = rng) -> Any:
        return own.normal()

    return draw


def generator() -> np.random.Generator:
    return np.random.default_rng(5)


def found_in(owner: object) -> dict[str, Any]:
    kinds = (np.random.Generator, torch.Generator, random.Random)
    return {one.path: one.value for one in reachable({"it": owner}) if isinstance(one.value, kinds)}


def five_deep(rng: Any) -> Any:
    composed = SimpleNamespace(transforms=[SimpleNamespace(transforms=[Jitter(rng)])])
    data = TensorDataset(torch.zeros(4))
    data.transform = composed  # type: ignore[attr-defined]
    return Subset(data, range(3))


HOLDERS: list[Callable[[Any], Any]] = [
    Jitter,
    Slotted,
    five_deep,
    by_closure,
    by_default,
    lambda rng: functools.partial(print, rng),
    lambda rng: functools.partial(print, key=Jitter(rng)),
    lambda rng: Jitter(rng).__init__,  # type: ignore[misc]
    lambda rng: [[{"a": (Jitter(rng),)}]],
    lambda rng: SimpleNamespace(module=torch.nn.Sequential(torch.nn.ReLU())).__dict__ | {"rng": rng},
]


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_an_object_holds_is_found_however_deep(holder: Callable[[Any], Any]) -> None:
    rng = generator()
    assert list(found_in(holder(rng)).values()) == [rng]


def test_attributes_of_submodules_are_found() -> None:
    inner = torch.nn.ReLU()
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential(inner))
    inner.noise = rng = torch.Generator()  # type: ignore[assignment]
    assert found_in(model) == {"it.1.0.noise": rng}


@pytest.mark.parametrize("holder", [by_global, by_another_function, ByMethod()])
def test_globals_are_found_where_a_function_names_them(holder: object) -> None:
    assert list(found_in(holder).values()) == [at_module_level]


def test_what_a_class_holds_is_found_unless_its_object_hides_it() -> None:
    assert found_in(OfTheClass()) == {"it.rng": OfTheClass.rng}
    own = OfTheClass()
    own.rng = random.Random(4)
    assert found_in(own) == {"it.rng": own.rng}


def test_each_object_is_found_once_by_its_shortest_path() -> None:
    rng = generator()
    assert found_in(SimpleNamespace(far=SimpleNamespace(near=rng), near=rng)) == {"it.near": rng}


def test_what_is_left_out_hides_what_only_it_holds() -> None:
    inner = Jitter(generator())
    found = reachable({"it": SimpleNamespace(inner=inner)}, without={id(inner)})
    assert [one.path for one in found] == ["it"]


def test_a_search_ends_in_cycles_and_in_what_is_large() -> None:
    owner = SimpleNamespace(rows=[[number] for number in range(100_000)])
    owner.self = owner
    assert len(list(reachable({"it": owner}))) == 2
    chain = SimpleNamespace()
    for _ in range(5000):
        chain = SimpleNamespace(inner=chain)
    assert len(list(reachable({"it": chain}, limit=100))) == 100


def test_a_search_goes_into_no_part_of_the_process() -> None:
    """By a logger all others can be reached, by a thread its target."""
    rng = generator()
    logger = logging.getLogger("test_reachable")
    logger.hidden = rng  # type: ignore[attr-defined]
    assert found_in([logger, threading.Thread(target=by_closure(rng)), threading.Lock()]) == {}


class Counting:
    total = 0

    def __init__(self) -> None:
        self.calls = 0


class OfALibrary(TensorDataset):
    """A script's class over one of a library."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(1))
        self.calls = 0


def own_paths(owner: object) -> set[str]:
    return {one.path for one in reachable({"it": owner}) if one.is_own}


def test_what_the_script_keeps_is_its_own() -> None:
    assert own_paths(Counting()) >= {"it.calls", "it.total"}
    assert "it.calls" in own_paths(OfALibrary()) and "it.tensors" not in own_paths(OfALibrary())
    assert own_paths(torch.nn.Linear(1, 1)) == set()


def test_modules_of_packages_are_not_the_scripts() -> None:
    assert is_own_module(__name__)
    assert not any(map(is_own_module, ["torch.nn", "numpy", "random", "checkpointing.errors", "not.imported"]))


class Shy:
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not before the first step")


def test_an_object_that_may_not_be_looked_at_hides_nothing_else() -> None:
    rng = generator()
    assert list(found_in([Shy.__new__(Shy), rng]).values()) == [rng]
