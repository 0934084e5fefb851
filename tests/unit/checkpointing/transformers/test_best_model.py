"""`load_best_model_at_end` without the Trainer's folders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.transformers.trainer import best_model_at_end


def run(
    *, wanted: bool = True, best: int | None = 10, found: int | None = 10, stopping: bool = False, fails: bool = False
) -> tuple[Any, list[int]]:
    args = SimpleNamespace(load_best_model_at_end=wanted)
    state = SimpleNamespace(best_global_step=best, best_model_checkpoint="/stock/checkpoint-3")
    loaded: list[int] = []

    def load(step: int) -> int | None:
        loaded.append(step)
        return found

    try:
        with best_model_at_end(args, state, load, "/runs/checkpoint-{}".format, stopping=stopping):
            # What the Trainer sees: nothing to load or to remove.
            assert not args.load_best_model_at_end
            assert not wanted or state.best_model_checkpoint is None
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert args.load_best_model_at_end == wanted
    return state.best_model_checkpoint, loaded


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("/runs/checkpoint-10", [10])),
        ({"wanted": False}, ("/stock/checkpoint-3", [])),
        # The best one could not be read; the next best one was.
        ({"found": 5}, ("/runs/checkpoint-5", [10])),
        ({"found": None}, (None, [10])),
        ({"best": None}, (None, [])),
        ({"stopping": True}, (None, [])),
        ({"fails": True}, ("/runs/checkpoint-10", [10])),
    ],
)
def test_the_best_model_is_loaded_from_our_checkpoints(options: dict[str, Any], expected: Any) -> None:
    assert run(**options) == expected
