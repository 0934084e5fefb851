"""What an object holds is seen for types that nobody has listed, by the pickle protocol."""

from __future__ import annotations

import array
import ctypes
import datetime
import decimal
import fractions
import functools
import io
import itertools
import operator
import queue
import sqlite3
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpointing.proof.fingerprints import MOST_OBJECTS, of_array, of_function, of_object, of_plain, of_tensor


def advanced(iterator: Any) -> Any:
    next(iterator)
    return iterator


def filled(value: Any, change: Callable[[Any], object]) -> Any:
    change(value)
    return value


class Holder:
    pass


ONE, OTHER = Holder(), Holder()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda: functools.partial(max, 1), lambda: functools.partial(max, 2)),
        (lambda: functools.partial(max, key=1), lambda: functools.partial(min, key=1)),
        (lambda: bytearray(b"a"), lambda: bytearray(b"b")),
        (lambda: memoryview(b"a"), lambda: memoryview(b"b")),
        (lambda: array.array("d", [1.0]), lambda: array.array("d", [2.0])),
        (lambda: decimal.Decimal("0.1"), lambda: decimal.Decimal("0.2")),
        (lambda: fractions.Fraction(1, 3), lambda: fractions.Fraction(2, 3)),
        (lambda: datetime.timedelta(1), lambda: datetime.timedelta(2)),
        (lambda: range(3), lambda: range(4)),
        (lambda: slice(3), lambda: slice(4)),
        (lambda: operator.itemgetter(1), lambda: operator.itemgetter(2)),
        (lambda: io.BytesIO(b"ab"), lambda: filled(io.BytesIO(b"ab"), lambda file: file.read(1))),
        (lambda: io.StringIO("ab"), lambda: filled(io.StringIO("ab"), lambda file: file.write("c"))),
        (lambda: iter([1, 2]), lambda: advanced(iter([1, 2]))),
        (lambda: iter(range(3)), lambda: advanced(iter(range(3)))),
        (lambda: iter({1: 2, 3: 4}), lambda: advanced(iter({1: 2, 3: 4}))),
        (lambda: enumerate([1, 2]), lambda: advanced(enumerate([1, 2]))),
        (lambda: map(abs, [1, 2]), lambda: advanced(map(abs, [1, 2]))),
        (lambda: filter(None, [1, 2]), lambda: advanced(filter(None, [1, 2]))),
        (lambda: zip([1, 2], [3, 4], strict=True), lambda: advanced(zip([1, 2], [3, 4], strict=True))),
        (lambda: itertools.islice([1, 2, 3], 2), lambda: advanced(itertools.islice([1, 2, 3], 2))),
        (lambda: itertools.chain([1], [2]), lambda: advanced(itertools.chain([1], [2]))),
        (lambda: itertools.product([1, 2]), lambda: advanced(itertools.product([1, 2]))),
        (lambda: itertools.accumulate([1, 2]), lambda: advanced(itertools.accumulate([1, 2]))),
        (lambda: itertools.cycle([1, 2]), lambda: advanced(itertools.cycle([1, 2]))),
        (lambda: itertools.count(1), lambda: itertools.count(2)),
        (lambda: OrderedDict(a=1), lambda: OrderedDict(a=2)),
        (lambda: Counter("a"), lambda: Counter("aa")),
        (lambda: ChainMap({"a": 1}), lambda: ChainMap({"a": 2})),
        (lambda: UserDict(a=1), lambda: UserDict(a=2)),
        (lambda: UserList([1]), lambda: UserList([2])),
        (lambda: deque([1]), lambda: deque([2])),
        (lambda: {1}, lambda: {2}),
        (lambda: {"a": 1}, lambda: {"b": 1}),
        (lambda: np.array(["a"]), lambda: np.array(["b"])),
        (lambda: np.array([1, None], object), lambda: np.array([2, None], object)),
        (lambda: np.array("2026-11-28", "M8[D]"), lambda: np.array("2026-11-29", "M8[D]")),
        (lambda: weakref.WeakValueDictionary(a=ONE), weakref.WeakValueDictionary),
        (lambda: weakref.WeakSet([ONE]), lambda: weakref.WeakSet([ONE, OTHER])),
        (lambda: 1 << 5000, lambda: (1 << 5000) + (1 << 2400)),
        (lambda: "x" * 5000, lambda: "x" * 5000 + "y"),
    ],
)
def test_a_change_is_seen_and_the_same_is_the_same(before: Callable[[], object], after: Callable[[], object]) -> None:
    assert of_object(before()) == of_object(before())
    assert of_object(before()) != of_object(after())


def test_rows_that_are_written_to_a_database_are_seen() -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table t (x)")
    before = of_object(connection)
    connection.execute("insert into t values (1)")
    assert of_object(connection) != before
    connection.close()


def test_a_place_in_a_file_is_seen(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("a\nb\n")
    with (tmp_path / "rows").open() as file:
        before = of_object(file)
        file.readline()
        assert of_object(file) != before


@pytest.mark.parametrize("value", [queue.Queue(), ctypes.c_int(1), object(), ONE, (one for one in [1])])
def test_what_shows_nothing_has_its_type(value: object) -> None:
    assert of_object(value) == of_object(value)


def test_nothing_is_asked_of_an_object_that_is_not_pythons() -> None:
    class Asked:
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise AssertionError("asked")

    assert of_object(Asked()) == of_object(Asked())


def test_an_iterator_is_not_moved_by_looking() -> None:
    iterators: list[Any] = [iter([1, 2]), zip([1, 2], [3, 4], strict=True), map(abs, [1]), itertools.chain([1], [2])]
    for iterator in iterators:
        of_object(iterator)
    assert [next(iterator) for iterator in iterators] == [1, (1, 3), 1, 1]


def test_functions_are_told_from_each_other() -> None:
    one: Any = lambda x: x  # noqa: E731
    other: Any = lambda x: -x  # noqa: E731
    kept: list[int] = []
    functions: list[Any] = [one, other, abs, max, int, kept.append, kept.extend]
    found = [of_function(function) for function in functions]
    assert len(set(found)) == len(found)


def test_small_tensors_and_arrays_are_read_whole_and_large_ones_at_places() -> None:
    tensor = torch.zeros(1000, 8)
    before, arrays = of_tensor(tensor), of_array(tensor.numpy())
    tensor[777, 3] = 1
    assert of_tensor(tensor) != before and of_array(tensor.numpy()) != arrays
    large = torch.zeros(1 << 20)
    before = of_tensor(large)
    large[1 << 10 :] = 1
    assert of_tensor(large) != before


def test_a_long_container_is_not_read_to_its_end() -> None:
    assert of_object([0] * MOST_OBJECTS + [1]) == of_object([0] * MOST_OBJECTS + [2])
    assert of_plain("a") != of_plain("b") != of_plain(b"b", 1)


def test_what_another_thread_changes_meanwhile_raises_nothing() -> None:
    class Wild(dict[Any, Any]):
        def items(self) -> Any:
            raise RuntimeError("dictionary changed size during iteration")

    assert isinstance(of_object(Wild(a=1)), int)
