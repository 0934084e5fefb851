from __future__ import annotations

import pytest

from checkpointing.rank.replicas import describe_differing_ranks


@pytest.mark.parametrize(
    ("sums", "text"),
    [
        ([[1, 2], [1, 3]], "the 2 ranks hold different values"),
        ([[1, 2], [1, 3], [1, 2]], "rank 1 holds other values than the others"),
        ([[1], [2], [1], [3], [1]], "ranks 1, 3 hold other values than the others"),
        ([[1], [2], [1], [2]], "the 4 ranks hold different values"),
    ],
)
def test_the_rank_that_is_not_as_the_others_is_named(sums: list[list[int]], text: str) -> None:
    assert describe_differing_ranks(sums) == text
