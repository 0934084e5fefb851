"""Every order of steps of two nodes that write one file: what is published is what was trained, and stays so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from chaos.commit_model import explore
from chaos.split_model import CODED, SplitModel

# What is broken, where that shows, and how.
MUTATIONS = {
    "compares_digests": (True, "the checkpoint has good and bad"),
    "reports_what_is_written": (True, "the checkpoint has good and nothing"),
    "writes_alone_elsewhere": (True, "the checkpoint has good and bad"),
}


@pytest.mark.parametrize("disk", [True, False])
def test_what_is_published_is_whole_and_stays_so(disk: bool) -> None:
    outcome = explore(SplitModel(disk=disk))
    assert outcome.fault is None, str(outcome)
    assert outcome.num_states > 100, str(outcome)


@pytest.mark.parametrize("rule", MUTATIONS)
def test_each_rule_is_needed(rule: str) -> None:
    disk, fault = MUTATIONS[rule]
    outcome = explore(SplitModel(disk=disk, rules=replace(CODED, **{rule: False})))
    assert outcome.fault == fault, str(outcome)
