"""The sum of words that shares add up to."""

from __future__ import annotations

import itertools
import random

import pytest

from checkpointing.format.word_sum import added, word_sum

DATA = random.Random(1).randbytes(1003)


@pytest.mark.parametrize("cuts", [(), (8,), (5,), (1, 2, 3), (8, 9, 500, 501), (999, 1000)])
def test_parts_add_up_to_the_whole(cuts: tuple[int, ...]) -> None:
    places = [0, *cuts, len(DATA)]
    parts = [word_sum(DATA[begin:end], begin) for begin, end in itertools.pairwise(places)]
    assert added(parts) == word_sum(DATA)


def test_any_bit_that_flips_changes_it() -> None:
    for position in range(0, len(DATA), 7):
        for bit in range(8):
            other = bytearray(DATA)
            other[position] ^= 1 << bit
            assert word_sum(bytes(other)) != word_sum(DATA)


def test_nothing_is_zero_and_carries_wrap() -> None:
    assert word_sum(b"") == 0 == word_sum(b"\0" * 9)
    assert word_sum(b"\xff" * 16) == (1 << 64) - 2
