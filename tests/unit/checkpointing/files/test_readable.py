"""What is saved first is read back by the real reader: refused by its path, or kept exactly."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpointing.errors import CheckpointError
from checkpointing.files.readable import check_readable
from checkpointing.process.trees import freeze


class Own:
    pass


@pytest.mark.parametrize(
    "value",
    [
        1, 2.5, float("nan"), float("inf"), True, None, "text", b"bytes", 3 + 4j, (1, (2, [3])), {"a": {2: [None]}},
        collections.OrderedDict(a=1), torch.Size([2, 3]), torch.float32, torch.zeros(2, 3),
        torch.nn.Parameter(torch.ones(1)),
        np.arange(6.0).reshape(2, 3), np.array([True, False]), np.array([1, 2], dtype=np.uint8),
        np.float64(0.1), np.int64(7), np.bool_(True),
    ],
)  # fmt: skip
def test_what_can_be_kept_exactly_is(value: Any) -> None:
    check_readable("mine.pt", freeze({"value": [value]}))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.float32(0.1), "numpy.float32"),
        (collections.deque([1]), "collections.deque"),
        (Path("x"), "pathlib"),
        (Own(), "Own"),
        (lambda: None, "function"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (np.array(["text"]), "numpy.ndarray"),
        (np.array([object()]), "numpy.ndarray"),
    ],
)
def test_what_cannot_is_refused_by_its_path(value: Any, kind: str) -> None:
    path = re.escape("optimizer.param_groups[0]['lr']")
    with pytest.raises(CheckpointError, match=rf"^{path}: .*{re.escape(kind)}"):
        check_readable("optimizer.pt", freeze({"param_groups": [{"lr": value, "betas": (0.9, 0.99)}]}))


@pytest.mark.parametrize("odd", [torch.eye(2).to_sparse(), Own()])
def test_it_is_found_behind_tensors_of_a_kind_that_was_seen(odd: Any) -> None:
    steps: list[Any] = [torch.zeros(())]
    state = {number: {"exp_avg": torch.zeros(3), "steps": list(steps)} for number in range(3)}
    check_readable("optimizer.pt", {"state": state})
    state[2]["steps"] = [*steps, odd]
    with pytest.raises(CheckpointError, match=r"^optimizer.state\[2\]\['steps'\]\[1\]: "):
        check_readable("optimizer.pt", {"state": state})


def test_the_file_that_is_read_back_does_not_grow_with_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    load = torch.load

    def measured(file: str, **options: Any) -> Any:
        sizes.append(Path(file).stat().st_size)
        return load(file, **options)

    monkeypatch.setattr(torch, "load", measured)
    for number in (2, 2000):
        check_readable("optimizer.pt", {"state": [{"exp_avg": torch.zeros(3)} for _ in range(number)]})
    assert sizes[1] < sizes[0] + 20_000


def test_numbers_of_numpy_become_pythons_where_nothing_is_lost() -> None:
    frozen = freeze({"lr": np.float64(0.1), "n": np.int64(3), "flag": np.bool_(False), "single": np.float32(0.1)})
    assert [type(value) for value in frozen.values()] == [float, int, bool, np.float32]


def test_a_dict_of_another_kind_stays_one() -> None:
    ordered = collections.OrderedDict([("b", torch.zeros(1)), ("a", 1)])
    frozen = freeze(ordered)
    assert type(frozen) is collections.OrderedDict and list(frozen) == ["b", "a"]
    ordered["b"] = None
    assert frozen["b"] is not None
    # MultiStepLR's milestones: they doubled with every save.
    assert freeze(collections.Counter({2: 1, 5: 1})) == collections.Counter({2: 1, 5: 1})
