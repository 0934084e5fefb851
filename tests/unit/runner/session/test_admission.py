"""Which nodes train next, as a table."""

from __future__ import annotations

import pytest

from runner.errors import UsageError
from runner.session.admission import _FOLLOW_S, _RETURN_S, Limits, Seen, admit, change

FIXED = Limits(3, 3)
ELASTIC = Limits(2, 3, last_call_s=30, grow_interval_s=60)


def nodes(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


@pytest.mark.parametrize(
    ("ready", "missing"), [((0,), [1, 2]), ((0, 2), [1]), ((0, 5), [1]), ((0, 4, 5), []), ((3, 4, 5, 6), [])]
)
def test_a_spare_takes_the_place_of_a_missing_node(ready: tuple[int, ...], missing: list[int]) -> None:
    assert FIXED.missing(nodes(*ready)) == missing


@pytest.mark.parametrize(
    ("limits", "seen", "enough_s", "chosen"),
    [
        # All, or nobody.
        (FIXED, Seen(nodes(0, 1)), 0, None),
        (FIXED, Seen(nodes(0, 1, 2)), 0, {0, 1, 2}),
        (FIXED, Seen(nodes(0, 1), members=nodes(0, 1, 2)), 1e9, None),
        # The first attempt: as many as come in time.
        (ELASTIC, Seen(nodes(0)), 0, None),
        (ELASTIC, Seen(nodes(0, 1)), 29, None),
        (ELASTIC, Seen(nodes(0, 1)), 30, {0, 1}),
        (ELASTIC, Seen(nodes(0, 1, 2)), 0, {0, 1, 2}),
        # One is lost: without waiting for it, nor for a node that is new.
        (ELASTIC, Seen(nodes(0, 2), members=nodes(0, 1, 2)), 0, {0, 2}),
        (ELASTIC, Seen(nodes(0, 2), nodes(3), nodes(0, 1, 2)), 0, {0, 2}),
        (ELASTIC, Seen(nodes(0), members=nodes(0, 1, 2)), 1e9, None),
        # The others' ranks are still ending.
        (ELASTIC, Seen(nodes(0, 1), nodes(2), nodes(0, 1, 2)), 0, None),
        (ELASTIC, Seen(nodes(0, 1), nodes(2), nodes(0, 1, 2)), _RETURN_S, {0, 1}),
        # More than the run may have: those that hold the state first, then the lowest.
        (Limits(1, 2), Seen(nodes(0, 1, 2), members=nodes(0, 2)), 0, {0, 2}),
        (Limits(1, 2), Seen(nodes(0, 1, 2, 3)), 0, {0, 1}),
        # The leader is lost: those that followed it look for the next one.
        (ELASTIC, Seen(nodes(1, 2), leader=1, expected=nodes(1, 2)), 0, {1, 2}),
        (Limits(1, 3, 30), Seen(nodes(1), leader=1, expected=nodes(1, 2)), 4, None),
        (Limits(1, 3, 30), Seen(nodes(1), leader=1, expected=nodes(1, 2)), _FOLLOW_S, {1}),
        (ELASTIC, Seen(nodes(1), leader=1, expected=nodes(1)), 1e9, None),
        # The leader always.
        (Limits(1, 2), Seen(nodes(0, 1, 2), members=nodes(0, 1), leader=2), 0, {0, 2}),
        (Limits(1, 2), Seen(nodes(0, 1, 2), members=nodes(1, 2)), 0, {0, 1}),
        # As many as can share the samples of a step: 4 ranks can, 3 nodes of 2 cannot.
        (Limits(1, 4, samples=8, local_ranks=2), Seen(nodes(0, 1, 2), members=nodes(0, 1, 2, 3)), 0, {0, 1}),
        # Of 2 nodes with 2 ranks each, all 4 ranks compute the same samples; 3 nodes cannot.
        (Limits(1, 4, samples=1, local_ranks=2, model_ranks=4), Seen(nodes(0, 1, 2)), 0, {0, 1}),
        (Limits(3, 4, samples=8, local_ranks=2), Seen(nodes(0, 1, 2), members=nodes(0, 1, 2, 3)), 0, None),
        # Unless some ranks may have fewer samples than others; each needs one, and one more makes it uneven.
        (Limits(1, 4, samples=8, local_ranks=2, uneven=True), Seen(nodes(0, 1, 2), members=nodes(0, 1)), 0, {0, 1, 2}),
        (Limits(1, 4, samples=5, local_ranks=2, uneven=True), Seen(nodes(0, 1, 2), members=nodes(0, 1)), 0, {0, 1}),
        # Two of three are all that can: no last call.
        (Limits(1, 3, 30, samples=8, local_ranks=1), Seen(nodes(0, 1)), 0, {0, 1}),
    ],
)
def test_who_begins(limits: Limits, seen: Seen, enough_s: float, chosen: set[int] | None) -> None:
    assert admit(limits, seen, enough_s=enough_s) == chosen


@pytest.mark.parametrize(
    ("seen", "leaving", "since_s", "chosen"),
    [
        (Seen(nodes(0), members=nodes(0, 1, 2)), set(), 1e9, None),
        # It has come back, but not long enough after the last change.
        (Seen(nodes(0, 2), members=nodes(0, 1)), set(), 59, None),
        (Seen(nodes(0, 2), members=nodes(0, 1)), set(), 60, {0, 1, 2}),
        (Seen(nodes(0), nodes(2), nodes(0, 1)), set(), 60, None),
        # A spare changes nothing, but is there when one leaves.
        (Seen(nodes(0, 3), members=nodes(0, 1, 2)), set(), 60, None),
        (Seen(nodes(0, 3), members=nodes(0, 1, 2)), {1}, 0, {0, 2, 3}),
        (Seen(nodes(0), members=nodes(0, 1, 2)), {1}, 0, {0, 2}),
        # Too few would be left: the run stops as a whole, which is not decided here.
        (Seen(nodes(0), members=nodes(0, 1)), {1}, 0, None),
    ],
)
def test_what_a_running_attempt_is_paused_for(
    seen: Seen, leaving: set[int], since_s: float, chosen: set[int] | None
) -> None:
    assert change(ELASTIC, seen, leaving=leaving, since_change_s=since_s) == chosen


def test_only_a_range_is_elastic() -> None:
    assert ELASTIC.is_elastic and not FIXED.is_elastic


@pytest.mark.parametrize(
    ("uneven", "parts", "text"),
    [
        (True, "virtual ranks", "has 4 virtual ranks, which 6 ranks cannot share; start at most 4 ranks in all"),
        (False, "samples", "has 4 samples, which 6 ranks cannot share equally; start 1, 2, 4 ranks in all"),
    ],
)
def test_too_many_ranks_for_a_step(uneven: bool, parts: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Limits(3, 3, samples=4, local_ranks=2, uneven=uneven, parts=parts).check()
