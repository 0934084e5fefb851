"""Every order of steps of nodes that compete to lead: what must hold, holds; and each rule is needed for that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from chaos.commit_model import explore
from chaos.lease_model import DESIGNED, LeaseModel, without_a_way_out

# What is explored, and how many states there are at least: a model that does nothing passes, too.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "two nodes": ({}, 100),
    "three nodes": ({"nodes": 3}, 1_000),
    "a lost answer": ({"answers_to_lose": 1, "disk": False}, 500),
    "two lost answers": ({"answers_to_lose": 2, "disk": False}, 1_000),
    "a lost answer and a node that is killed": ({"answers_to_lose": 1, "kills": 1, "disk": False}, 1_000),
    "a node that is killed and comes back": ({"kills": 2}, 1_000),
    "a power cut": ({"cuts": 1}, 500),
    "a power cut and a lost answer": ({"cuts": 1, "answers_to_lose": 1, "kills": 1}, 5_000),
}
LARGE: dict[str, dict[str, Any]] = {
    "three nodes, everything": {"nodes": 3, "numbers": 3, "kills": 1, "answers_to_lose": 1, "cuts": 1},
    "four attempts": {"numbers": 4, "kills": 2, "answers_to_lose": 2, "cuts": 1},
}
# What is broken, within which bounds that shows, and how.
MUTATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "puts_if_absent": ({"numbers": 1}, "begins 1: so has"),
    "reads_back": ({"answers_to_lose": 1, "disk": False}, "begins 1: so has"),
    "goes_on_from_its_own": ({}, "goes on to 3: 1 leads 2"),
    "flushes": ({"cuts": 1}, "begins 1: so has"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_leads_at_a_time_and_some_node_can(case: str) -> None:
    bounds, at_least = CASES[case]
    outcome = explore(LeaseModel(**bounds))
    assert outcome.fault is None, str(outcome)
    assert outcome.num_states >= at_least, str(outcome)
    assert not without_a_way_out(LeaseModel(**bounds))


@pytest.mark.soak
@pytest.mark.parametrize("case", LARGE)
def test_within_wider_bounds(case: str) -> None:
    outcome = explore(LeaseModel(**LARGE[case]))
    assert outcome.fault is None, str(outcome)
    assert outcome.num_states >= 100_000, str(outcome)


@pytest.mark.parametrize("rule", MUTATIONS)
def test_each_rule_is_needed(rule: str) -> None:
    bounds, fault = MUTATIONS[rule]
    outcome = explore(LeaseModel(**bounds, rules=replace(DESIGNED, **{rule: False})))
    assert outcome.fault is not None and fault in f"{outcome.trace[-1]}: {outcome.fault}", str(outcome)
