"""Nested containers with tensors in them."""

from __future__ import annotations

import collections
from types import MappingProxyType
from typing import Any

import pytest
import torch

from checkpointing.process.trees import freeze, replaced, tensors_in

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
