"""Which variables carry something through a loop is read from its bytecode, while it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import pytest

from checkpointing.process.carried import LoopVariables, carried_by


def here() -> LoopVariables:
    return carried_by(sys._getframe(1))


def counts() -> LoopVariables:
    count, found = 0, here()
    for _ in range(2):
        count += 2
        found = here()
    return found


def computes() -> LoopVariables:
    found = here()
    for step in range(2):
        loss = step * 2
        twice = loss + 1
        found = here()
    assert twice
    return found


def counts_in_a_while_loop() -> LoopVariables:
    count, found = 0, here()
    while count < 3:
        count += 2
        found = here()
    return found


def counts_around_an_inner_loop() -> LoopVariables:
    count, found = 0, here()
    for _ in range(2):
        count += 2
        for _ in range(2):
            found = here()
    return found


def counts_in_an_inner_loop() -> LoopVariables:
    count, found = 0, here()
    for _ in range(2):
        for _ in range(2):
            count += 2
            found = here()
    return found


def counts_for_a_function_within() -> LoopVariables:
    count, found = 0, here()

    def read() -> int:
        return count

    for _ in range(2):
        count += read()
        found = here()
    return found


def begins_each_step() -> LoopVariables:
    found = here()
    for step in range(2):
        count = 0
        for micro in range(2):
            count += step * micro
        found = here()
        assert count >= 0
    return found


def reads_what_only_another_branch_sets() -> LoopVariables:
    count, found = 0, here()
    for step in range(3):
        if step and count < 5:
            count = step
        found = here()
    return found


def sets_it_in_one_branch_and_counts_in_the_other() -> LoopVariables:
    count, found = 0, here()
    for step in range(3):
        if step == 1:
            count = 0
        else:
            count += 1
        found = here()
    return found


def sets_it_in_both_branches() -> LoopVariables:
    found = here()
    for step in range(3):
        if step:  # noqa: SIM108 - two stores
            count = 0
        else:
            count = 1
        found = here() if count < 5 else found
    return found


@pytest.mark.parametrize(
    ("loop", "carries"),
    [
        (sets_it_in_one_branch_and_counts_in_the_other, True),
        (sets_it_in_both_branches, False),
        (counts, True),
        (counts_in_a_while_loop, True),
        (counts_around_an_inner_loop, True),
        (counts_in_an_inner_loop, True),
        (counts_for_a_function_within, True),
        (reads_what_only_another_branch_sets, True),
        (begins_each_step, False),
    ],
)
def test_what_an_iteration_reads_before_it_sets_it_is_carried(loop: Callable[[], LoopVariables], carries: bool) -> None:
    assert ("count" in loop().carried) == carries


def test_what_a_step_computes_is_not_carried() -> None:
    assert not computes().carried & {"loss", "twice", "step"}


def logs(values: Iterable[int]) -> LoopVariables:
    log, seen, recent, found = list[int](), set[int](), list[int](), here()
    for value in values:
        log.append(value)
        seen.add(value)
        recent.append(value)
        if sum(recent) > 9:
            recent.clear()
        found = here()
    return found


def test_what_is_only_added_to_is_not_used() -> None:
    found = logs([1, 2])
    assert "recent" in found.used and not {"log", "seen"} & found.used and {"log", "seen"} <= found.appended


def test_outside_of_a_loop_nothing_is_carried() -> None:
    assert here() == LoopVariables()


def test_a_module_is_a_loop_like_any_other() -> None:
    names: dict[str, object] = {"here": here, "found": None}
    exec("count = 0\nfor number in range(2):\n    count += 1\n    found = here()\n", names)
    found = names["found"]
    assert isinstance(found, LoopVariables) and "count" in found.carried and "number" not in found.carried
