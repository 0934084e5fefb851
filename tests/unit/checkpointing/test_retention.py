from __future__ import annotations

import pytest

from checkpointing.retention import steps_to_remove


@pytest.mark.parametrize(
    ("steps", "keep", "removed"),
    [
        ([], 3, []),
        ([10], 0, []),
        ([10, 20], 1, [10]),
        ([30, 10, 20, 40], 2, [10, 20]),
        ([10, 20], None, []),
        ([10, 20], 5, []),
    ],
)
def test_the_newest_stay(steps: list[int], keep: int | None, removed: list[int]) -> None:
    assert steps_to_remove(steps, keep) == removed
