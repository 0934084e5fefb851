"""Nested containers with tensors in them."""

from __future__ import annotations

import collections
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from checkpointing.process.trees import freeze, kinds_in, replaced, tensors_in

ONE, TWO = torch.ones(1), torch.full((2,), 2.0)


def test_tensors_are_found_in_order() -> None:
    tree = {"a": [ONE, (TWO, 3)], "b": MappingProxyType({"c": ONE}), "d": object()}
    assert [id(tensor) for tensor in tensors_in(tree)] == [id(ONE), id(TWO), id(ONE)]


def test_a_frozen_tree_does_not_see_later_replacements() -> None:
    tree: dict[str, Any] = {"group": [{"lr": 0.1}], "moment": ONE}
    frozen = freeze(tree)
    tree["group"][0]["lr"] = 0.2
    tree["moment"] = TWO
    assert frozen["group"] == [{"lr": 0.1}] and frozen["moment"] is ONE


def test_shared_containers_stay_shared() -> None:
    shared = [ONE]
    tree = {"a": shared, "b": (shared, "text")}
    found = replaced(tree, lambda leaf: TWO if leaf is ONE else leaf)
    assert found["a"] is found["b"][0] and found["a"][0] is TWO and found["b"][1] == "text"
    assert tree["a"] is shared and shared[0] is ONE


def test_dicts_keep_their_type() -> None:
    assert type(replaced(collections.OrderedDict(a=1), str)) is collections.OrderedDict


@pytest.mark.parametrize("key", [ONE, ("a", ONE)])
def test_a_tensor_as_a_key_is_refused(key: Any) -> None:
    with pytest.raises(ValueError, match="a key of a dict is a tensor"):
        replaced({key: 1}, lambda leaf: leaf)


def test_a_window_does_not_see_what_is_appended_later() -> None:
    window: Any = collections.deque([[1]], maxlen=2)
    tree = {"window": window, "by_name": collections.defaultdict(list, a=[ONE])}
    frozen = freeze(tree)
    window[0].append(2)
    window.append(3)
    tree["by_name"]["a"].append(TWO)
    assert list(frozen["window"]) == [[1]] and frozen["window"].maxlen == 2
    assert frozen["by_name"]["a"] == [ONE] and [id(one) for one in tensors_in(frozen)] == [id(ONE)]


def test_tensors_in_a_window_are_replaced() -> None:
    found = replaced(collections.deque([ONE], maxlen=1), lambda leaf: TWO)
    assert type(found) is collections.deque and found[0] is TWO and found.maxlen == 1


def test_the_kinds_in_a_tree_are_those_of_keys_factories_and_elements_too() -> None:
    found: set[object] = set()
    counts: Any = collections.defaultdict(set)
    counts["b"] = (np.zeros(1, np.int16),)
    tree = {np.int32(1): [ONE], "a": counts}
    kinds_in(freeze(tree), found)
    assert found >= {dict, list, tuple, str, np.int32, set, np.ndarray, np.dtype(np.int16)}
    assert torch.Tensor not in found
